"""The encoder against Funnel-Transformer's own code, and transformers', in every layer: hidden states and gradients."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from whereformer import Electra, ElectraPretrainingConfig, Encoder, EncoderConfig
from whereformer.models.checkpoints.bert import from_bert
from whereformer.models.checkpoints.families import FAMILIES
from whereformer.models.checkpoints.loading import BODY
from whereformer.models.checkpoints.options import funnel_layers

GOLDEN = Path(__file__).parents[1] / "golden" / "funnel"
TOLERANCE = 2e-5
AUTHORS = {
    "embeddings.word_embeddings.weight": "input_layer.0.lookup_table",
    "embeddings.layer_norm.weight": "input_layer.1.weight",
    "embeddings.layer_norm.bias": "input_layer.1.bias",
}


@cache
def opened(file):
    """Metadata and tensors of a file."""
    with safe_open(GOLDEN / f"{file}.safetensors", "pt") as golden:
        return {key: json.loads(value) if value[0] == "{" else value for key, value in golden.metadata().items()}, {
            name: golden.get_tensor(name)
            for name in golden.keys()  # noqa: SIM118
        }


def weights(name, source):
    """A model's sizes and its state dict as a source names it."""
    metadata, tensors = opened(f"weights_{name}")
    prefix = f"{source}/"
    return metadata["config"], {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def cases(*files):
    return [pytest.param(file, case, id=f"{file}-{case}") for file in files for case in opened(file)[0]["cases"]]


def settings(file, case):
    return opened(file)[0]["cases"][case]


def tensors(file, case):
    prefix = f"{case}/"
    return {name.removeprefix(prefix): x for name, x in opened(file)[1].items() if name.startswith(prefix)}


def configuration(sizes, case, kind=EncoderConfig, **changes):
    """The configuration of a case of the original code."""
    options = {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["d_model"],
        "num_attention_heads": sizes["n_head"],
        "head_dim": sizes["d_head"],
        "intermediate_size": sizes["d_inner"],
        "blocks": sizes["block_size"].replace("_", "-"),
        "pooling": case["pooling_type"],
        "pool_query_only": case["pool_q_only"],
        "separate_cls": case["separate_cls"],
        "truncate_seq": case["truncate_seq"],
        "position": "transformer_xl",
        "position_options": {"form": "shifted" if case["attn_type"] == "rel_shift" else "factorized"},
        "hidden_act": "gelu_new",
        "query_bias": False,
        "type_vocab_size": 3,
        "segments": "attention",
        "layer_norm_eps": 1e-9,
        "pad_token_id": None,
    }
    return kind(**{**options, **changes})


def inputs(stored, *, segments=None):
    """What the encoder is given: the authors' mask says where padding is."""
    arguments = {"input_ids": stored["input_ids"].long()}
    if "input_mask" in stored:
        arguments["attention_mask"] = 1 - stored["input_mask"].long()
    types = stored.get("seg_id", segments)
    return arguments if types is None else {**arguments, "token_type_ids": types.long()}


def close(actual, golden, tolerance=TOLERANCE):
    torch.testing.assert_close(actual, golden, rtol=tolerance, atol=tolerance)


def from_authors(state, config):
    """The authors' tensors by transformers' names: linear layers are (inputs, outputs) there, with heads as an axis."""
    names, theirs = set().union(*FAMILIES["funnel"].encoder_names(config).values()), dict(AUTHORS)
    for layer, prefix in enumerate(funnel_layers(config)):
        for name in {name for name in names if name.startswith(prefix) and "q_head.bias" not in name}:
            part = name.removeprefix(prefix).replace("linear_1", "pffn.0").replace("linear_2", "pffn.3")
            theirs[name] = re.sub("^attention", f"attn_layers.{layer}", re.sub("^ffn", f"pffn_layers.{layer}", part))
    params = {name: state[authors] for name, authors in theirs.items()}
    for name in theirs.keys() - AUTHORS.keys():
        if name.endswith(".bias"):
            params[name] = params[name].flatten()
        elif name.endswith(".weight") and params[name].dim() > 1:
            params[name] = (params[name].flatten(0, -2) if "post_proj" in name else params[name].flatten(1)).T
    return params


def from_funnel(state, config):
    funnel = FAMILIES["funnel"]
    conversion = from_bert(state, funnel, config, config, funnel.tasks["Model"])
    return {name.removeprefix(BODY): tensor for name, tensor in conversion.state.items()}


def authors_encoder(name, case, **changes):
    sizes, state = weights(name, "authors")
    config = configuration(sizes, case, **changes)
    model = Encoder(config).eval()
    model.load_state_dict(from_funnel(from_authors(state, config), config))
    return model


@pytest.mark.parametrize(
    ("file", "case"),
    [
        # A third of each file's cases is not slow.
        case if turn % 3 == 0 else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        for turn, case in enumerate(cases("enc_W1", "enc_W2", "enc_W3", "enc_W4", "enc_W5"))
    ],
)
def test_every_layer(file, case):
    stored = tensors(file, case)
    model = authors_encoder(file.removeprefix("enc_"), settings(file, case))
    probabilities = {int(name[11:]): x for name, x in stored.items() if name.startswith("attn_probs_")}
    with torch.no_grad():
        out = model(**inputs(stored), output_hidden_states=True, output_attentions=bool(probabilities))
    hidden = [name for name in stored if name.startswith("hidden_")]
    assert len(hidden) == len(out.hidden_states)
    for name in hidden:
        close(out.hidden_states[int(name[7:])], stored[name])
    for layer, golden in probabilities.items():
        close(out.attentions[layer], golden)


SOURCES = {"hf": "all", "fixed": "any", "tf": "any"}
"""How each source of the decoder's numbers pools masks."""


def decoded():
    """Each case with the sources that could run it, or have numbers of their own."""
    names = opened("full_W1")[1]
    pairs = dict.fromkeys(tuple(name.split("/")[:2]) for name in names if name.split("/")[1] in SOURCES)
    return [pytest.param(case, source, id=f"{case}-{source}") for case, source in pairs]


@pytest.mark.parametrize(("case", "source"), decoded())
def test_decoder(case, source):
    stored = tensors("full_W1", case)
    golden = {name.removeprefix(f"{source}/"): x for name, x in stored.items() if name.startswith(f"{source}/")}
    sizes, state = weights("W1", "hf")
    config = configuration(sizes, settings("full_W1", case), decoder_layers="2", mask_pooling=SOURCES[source])
    model = Encoder(config).eval()
    model.load_state_dict(from_funnel(state, config))
    # Without segments transformers takes all of them for the first, and the authors do without the score.
    segments = None if source == "tf" else torch.zeros_like(stored["input_ids"])
    with torch.no_grad():
        out = model(**inputs(stored, segments=segments), output_hidden_states=True)
    for name, tensor in golden.items():
        if name.startswith("hidden_"):
            close(out.hidden_states[int(name[7:])], tensor)
    close(out.last_hidden_state, golden["decoder" if source == "tf" else "last_hidden_state"])


def authors_gradients():
    return [case for case in opened("grads_W1")[0]["cases"] if case.startswith("authors_")]


@pytest.mark.parametrize("case", authors_gradients())
def test_gradients(case):
    stored = tensors("grads_W1", case)
    sizes, state = weights("W1", "authors")
    config = configuration(sizes, settings("grads_W1", case))
    model = Encoder(config).eval()
    model.load_state_dict(from_funnel(from_authors(state, config), config))
    head = [state[f"cls_head.{name}"].clone() for name in ("0.weight", "0.bias", "3.weight", "3.bias")]
    out = model(**inputs(stored), output_hidden_states=True)
    loss = sum((out.hidden_states[int(name[2:])] * x).mean() for name, x in stored.items() if name.startswith("R_"))
    summary = torch.tanh(out.last_hidden_state[:, 0] @ head[0] + head[1])
    loss = loss + ((summary @ head[2] + head[3]) ** 2).mean()
    close(loss.detach(), stored["loss"])
    loss.backward()
    golden = {name.removeprefix("grad/"): x for name, x in stored.items() if name.startswith("grad/")}
    expected = from_funnel(from_authors(golden, config), config)
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def from_tf(state, prefix, layers, rest):
    """A model's state dict from TF variables under ``prefix``; ``rest`` names those outside of layers, ours first."""
    params, position = {}, {"content_bias": [], "position_bias": [], "kernel": []}
    for index, name in enumerate(layers):
        att, ff = f"{prefix}/{name}/rel_attn", f"{prefix}/{name}/ff"
        ours = f"encoder.layers.{index}"
        for letter, part in {"q": "query", "k": "key", "v": "value"}.items():
            params[f"{ours}.attention.{part}.weight"] = state[f"{att}/{letter}/kernel"].flatten(1).T
            if letter != "q":
                params[f"{ours}.attention.{part}.bias"] = state[f"{att}/{letter}/bias"].flatten()
        params[f"{ours}.attention.out.weight"] = state[f"{att}/o/kernel"].flatten(0, 1).T
        params[f"{ours}.attention.out.bias"] = state[f"{att}/o/bias"]
        params[f"{ours}.attention.segments.bias"] = state[f"{att}/r_s_bias"]
        params[f"{ours}.attention.segments.weight"] = state[f"{att}/seg_embed"]
        for part, theirs in {"up": "layer_1", "down": "layer_2"}.items():
            params[f"{ours}.{part}.weight"] = state[f"{ff}/{theirs}/kernel"].T
            params[f"{ours}.{part}.bias"] = state[f"{ff}/{theirs}/bias"]
        for part, theirs in {"attention_norm": att, "feed_forward_norm": ff}.items():
            params[f"{ours}.{part}.weight"] = state[f"{theirs}/layer_norm/gamma"]
            params[f"{ours}.{part}.bias"] = state[f"{theirs}/layer_norm/beta"]
        position["content_bias"].append(state[f"{att}/r_w_bias"])
        position["position_bias"].append(state[f"{att}/r_r_bias"])
        position["kernel"].append(state[f"{att}/r/kernel"].flatten(1))
    for name, tensors in position.items():
        params[f"encoder.position.{name}"] = torch.stack(tensors)
    for ours, theirs in rest.items():
        tensor = state[f"{prefix}/{theirs}"]
        params[ours] = tensor.T if theirs.endswith("kernel") else tensor
    return params


def test_electra():
    """One joint step with the generator's samples given."""
    golden = tensors("electra_W1", *opened("electra_W1")[0]["cases"])
    sizes, discriminator = weights("W1", "tf")
    case = {"pooling_type": "mean", "pool_q_only": True, "separate_cls": True, "truncate_seq": True}
    config = configuration(
        sizes,
        {**case, "attn_type": "rel_shift"},
        ElectraPretrainingConfig,
        decoder_layers="2",
        layer_norm_eps=1e-8,
        generator_size=0.5,
    )
    layers = [*(f"encoder/layer_{layer}" for layer in range(4)), "decoder/layer_4", "decoder/layer_5"]
    params = from_tf(
        discriminator,
        "model",
        layers,
        {
            "discriminator_head.dense.weight": "binary_proj/dense/kernel",
            "discriminator_head.dense.bias": "binary_proj/dense/bias",
            "discriminator_head.out.weight": "binary_loss/weight",
            "discriminator_head.out.bias": "binary_loss/bias",
            "encoder.embeddings.word.weight": "input/word_embedding/lookup_table",
            "encoder.embeddings.norm.weight": "input/layer_norm/gamma",
            "encoder.embeddings.norm.bias": "input/layer_norm/beta",
        },
    )
    params["discriminator_head.out.weight"] = params["discriminator_head.out.weight"].unsqueeze(0)
    state = {f"discriminator.{name}": tensor for name, tensor in params.items()}
    params = from_tf(
        {name.removeprefix("gen_weights/"): x for name, x in golden.items()},
        "generator",
        layers,
        {
            "head.dense.weight": "lm_proj/dense/kernel",
            "head.dense.bias": "lm_proj/dense/bias",
            "head.norm.weight": "lm_proj/layer_norm/gamma",
            "head.norm.bias": "lm_proj/layer_norm/beta",
            "head.decoder.bias": "lm_loss/bias",
            "encoder.embeddings.projection.weight": "encoder/input_projection/kernel",
            "encoder.embeddings.projection.bias": "encoder/input_projection/bias",
        },
    )
    state |= {f"generator.{name}": tensor for name, tensor in params.items()}
    model = Electra(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) == set(model.all_tied_weights_keys)
    arguments = {name.removeprefix("in/"): x.long() for name, x in golden.items() if name.startswith("in/")}
    positions = arguments["mapping_pos"]
    out = model(
        arguments["masked"],
        attention_mask=1 - arguments["im"],
        token_type_ids=arguments["seg"],
        labels=torch.full_like(arguments["x"], -100).scatter(1, positions, arguments["target"]),
        sampled_ids=arguments["sampled"],
    )
    # Ours predicts the targets in the order of their positions.
    order = positions.argsort(1).unsqueeze(-1).expand(-1, -1, sizes["vocab_size"])
    close(out.generator_logits, golden["out/gen_logits"].gather(1, order).flatten(0, 1), 1e-4)
    close(out.generator_loss, golden["out/gen_loss"], 5e-5)
    close(out.discriminator_logits, golden["out/disc_logits"])
    close(50 * out.discriminator_loss, golden["out/disc_loss_weighted"], 5e-5)
    close(out.loss, golden["out/total"], 5e-5)
