"""Small models of transformers, and what their tests compare."""

from functools import partial

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn

from whereformer import attach
from whereformer.errors import InputError

attach_unverified = partial(attach, verify=False)
"""``attach`` without the comparison that takes most of its time; test_attach_verify makes it for all models here."""


def refused(message):
    """The context of an InputError with this message."""
    return pytest.raises(InputError, match=message)


LAYERS = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {"vocab_size": 50, **LAYERS, "max_position_embeddings": 40}
"""Sizes of an encoder, by their names in transformers' BERT and its kin."""


def of_both_stacks(**sizes):
    """Sizes that an encoder and a decoder have alike, as ``encoder_...`` and ``decoder_...``."""
    return {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}


MODERN = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def build(name, options, head="Model"):
    """A model of transformers by its name there, such as "Bert"."""
    return getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**options))


T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}


def make_t5(model_class=transformers.T5Model, **changes):
    return model_class(transformers.T5Config(**{**T5, **changes}))


def make_global_modernbert():
    """A ModernBERT without local attention."""
    try:
        return build("ModernBert", {**KINDS["modernbert"][1], "global_attn_every_n_layers": 1})
    except StrictDataclassFieldValidationError:
        pytest.skip("transformers 5.15 refuses its own defaults where all attention is global")


def switch(model, implementation):
    """Switch the attention, also of the encoders and decoders that older versions of transformers leave alone."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(implementation)


DISTIL = {"vocab_size": 50, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 40}
BART = {**of_both_stacks(layers=2, attention_heads=2, ffn_dim=32), "decoder_layers": 3}
KINDS = {
    "bert": ("Bert", SIZES),
    "albert": ("Albert", {**SIZES, "embedding_size": 8}),
    "roberta": ("Roberta", SIZES),
    "electra": ("Electra", {**SIZES, "embedding_size": 8}),
    "distilbert": ("DistilBert", DISTIL),
    "modernbert": ("ModernBert", {**MODERN, "local_attention": 6, "global_attn_every_n_layers": 2}),
    "t5": ("T5", T5),
    "gpt2": ("GPT2", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("Llama", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "bart": ("Bart", {**BART, "vocab_size": 50, "d_model": 16, "max_position_embeddings": 40}),
}
MODELS = {name: partial(build, *kind) for name, kind in KINDS.items()}
NAMED = [name for name in MODELS if name not in ("gpt2", "llama", "bart")]
SWITCHABLE = [name for name in MODELS if name != "bart"]


def enlarge(model, by=0.3):
    """The model in evaluation mode, with parameters so large that each one and every position matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return model.eval()


def make(name):
    """A tiny model that is enlarged."""
    torch.manual_seed(0)
    return enlarge(MODELS[name]() if isinstance(name, str) else name)


def batch(model, length=12, padded=True):
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (3, length))
    inputs = {"input_ids": ids}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 7:] = 0
        inputs["attention_mask"][2, 10:] = 0
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, 50, (3, 9))
    return inputs


def states(model, inputs=None, run=None):
    """The last hidden states of the tokens that are real; ``run`` is what runs the model, if not itself."""
    inputs = batch(model) if inputs is None else inputs
    hidden = (run or model)(**inputs).last_hidden_state
    if model.config.is_encoder_decoder or "attention_mask" not in inputs or inputs["attention_mask"].dim() != 2:
        return hidden
    return hidden[inputs["attention_mask"].bool()]


def train_step(model, inputs=None):
    """The loss and the gradients of a model, from weights that no dropout hides."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.train().zero_grad()
    loss = states(model, inputs).pow(2).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def close(actual, expected, factor=1.0):
    torch.testing.assert_close(actual, expected, rtol=1e-4 * factor, atol=2e-5 * factor)


def close_steps(actual, expected):
    """Compare the loss and the gradients of two steps. Rounding errors scale with a gradient's largest number."""
    torch.testing.assert_close(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-4, atol=1e-5 * max(1.0, largest), msg=name)


def positions_of(model):
    """The attached methods, an encoder's first."""
    return [
        part.whereformer for part in model.modules() if hasattr(part, "whereformer") and isinstance(part, nn.Module)
    ]


def contents(value, inside=0):
    """What an attribute is: plain values by themselves, tensors by their numbers too, all else by its identity."""
    if isinstance(value, torch.Tensor):
        return id(value), value.requires_grad, value.detach().cpu().numpy().tobytes()
    if isinstance(value, (list, tuple)) and inside < 4:
        return id(value) if isinstance(value, list) else None, [contents(item, inside + 1) for item in value]
    if isinstance(value, dict) and inside < 4:
        return id(value), [(key, contents(item, inside + 1)) for key, item in value.items()]
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return id(value)


def everything(model):
    """Every attribute of every module and of every configuration."""
    attributes = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            attributes[f"{name}.{key}"] = contents(value)
            if isinstance(value, transformers.PreTrainedConfig):
                attributes[f"{name}.{key}: fields"] = contents(vars(value))
                for inner, config in vars(value).items():
                    if isinstance(config, transformers.PreTrainedConfig):
                        attributes[f"{name}.{key}.{inner}: fields"] = contents(vars(config))
    return attributes
