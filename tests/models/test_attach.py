"""Position methods in transformers' own models: outputs, gradients, files, and the model afterwards as before."""

import copy
import json
import logging

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from tests.every import EVERY
from whereformer import Encoder, EncoderConfig, attach, detach, load_attached, load_pretrained
from whereformer.errors import InputError

from .checkpointing import checkpoint_activations, training_option
from .patched import INKLING
from .peers import SIZES, of_both_stacks

MODERN = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def make_t5(model_class=transformers.T5Model, **changes):
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return model_class(transformers.T5Config(**{**sizes, "decoder_start_token_id": 0, "dropout_rate": 0.0, **changes}))


def make_modernbert(**changes):
    layers = {"local_attention": 6, "global_attn_every_n_layers": 2}
    return transformers.ModernBertModel(transformers.ModernBertConfig(**{**MODERN, **layers, **changes}))


def make_global_modernbert():
    """A ModernBERT without local attention."""
    try:
        return make_modernbert(global_attn_every_n_layers=1)
    except StrictDataclassFieldValidationError:
        pytest.skip("transformers 5.15 refuses its own defaults where all attention is global")


def switch(model, implementation):
    """Switch the attention, also of the encoders and decoders that older versions of transformers leave alone."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(implementation)


MODELS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "albert": lambda: transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=8)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**SIZES)),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**SIZES, embedding_size=8)),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=50, dim=16, n_layers=3, n_heads=2, hidden_dim=32, max_position_embeddings=40
        )
    ),
    "modernbert": make_modernbert,
    "t5": make_t5,
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=40, bos_token_id=1, eos_token_id=2
        )
    ),
    "llama": lambda: transformers.LlamaModel(
        transformers.LlamaConfig(**SIZES | {"num_attention_heads": 4}, num_key_value_heads=2)
    ),
    "bart": lambda: transformers.BartModel(
        transformers.BartConfig(
            **{**of_both_stacks(layers=2, attention_heads=2, ffn_dim=32), "decoder_layers": 3},
            vocab_size=50,
            d_model=16,
            max_position_embeddings=40,
        )
    ),
}
NAMED = [name for name in MODELS if name not in ("gpt2", "llama", "bart")]
SWITCHABLE = [name for name in MODELS if name != "bart"]


def make(name):
    """A tiny model in evaluation mode, with weights that are large enough for every position to count."""
    torch.manual_seed(0)
    model = MODELS[name]() if isinstance(name, str) else name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


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


def close(found, expected, factor=1.0):
    torch.testing.assert_close(found, expected, rtol=1e-4 * factor, atol=2e-5 * factor)


def positions_of(model):
    """The attached methods, an encoder's first."""
    return [
        part.whereformer for part in model.modules() if hasattr(part, "whereformer") and isinstance(part, nn.Module)
    ]


def by_hand(biases):
    """An attention function that writes everything out and adds to each self-attention's scores what comes next."""

    def attend(module, query, key, value, mask, scaling=None, dropout=0.0, is_causal=None, position_bias=None, **_):
        n_q, n_k = query.shape[2], key.shape[2]
        if key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if n_q == n_k:
            scores = scores + next(biases)
        if position_bias is not None:
            scores = scores + position_bias
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attend


@pytest.mark.parametrize("position", ["tisa", "t5", "alibi", "tisa+fire"])
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_and_pass_adds_its_own_curve(name, position):
    if name == "t5" and position == "t5":
        pytest.skip("T5 has T5's biases")
    ours, theirs = make(name), make(name)
    attach(ours, position, **({"share_layers": False} if "tisa" in position else {}))
    with torch.no_grad():
        for parameter in (p for method in positions_of(ours) for p in method.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.5)
    inputs = batch(ours)
    biases = []
    for method in positions_of(ours):
        decodes = len(biases) > 0
        n = inputs["decoder_input_ids"].shape[1] if decodes else 12
        offsets = torch.arange(n) - torch.arange(n)[:, None]
        biases += [method.curve(offsets, layer=layer).unsqueeze(0) for layer in range(method.model.num_layers)]
    queue = iter(biases)
    AttentionInterface.register("by_hand", by_hand(queue))
    AttentionMaskInterface.register("by_hand", eager_mask)
    switch(theirs, "by_hand")
    close(states(ours, inputs), states(theirs, inputs))
    assert next(queue, None) is None


IN_ATTENTION = [
    "shaw",
    "t5",
    "floater",
    "tupe",
    "rope",
    "tisa",
    "alibi",
    "fire",
    "transformer_xl",
    "tupe+t5",
    "rope+tisa",
]


def as_encoder(bert, position, folder):
    bert.save_pretrained(folder)
    return load_pretrained(folder, position, separate_cls=False)


@pytest.mark.parametrize("position", IN_ATTENTION)
def test_bert_with_a_method_is_our_encoder(position, tmp_path):
    bert = make("bert")
    encoder = as_encoder(bert, position, tmp_path)
    attach(bert, position, keep_absolute=False)
    encoder.position.load_state_dict(bert.whereformer.state_dict())
    inputs = batch(bert)
    close(states(bert, inputs), states(encoder, inputs))


@pytest.mark.parametrize("variant", ["random", "factorized_random", "dense", "factorized_dense"])
def test_a_synthesizer_reads_the_layers_input(variant, tmp_path):
    bert = make("bert")
    encoder = as_encoder(bert, "none", tmp_path)
    attach(bert, "synthesizer", keep_absolute=False, variant=variant, content="mix", max_length=20)
    encoder.position = copy.deepcopy(bert.whereformer)
    inputs = batch(bert)
    close(states(bert, inputs), states(encoder, inputs))


def test_rope_is_modernberts_own_rotation():
    model = make(make_global_modernbert())
    expected = states(model)
    base = model.config.rope_parameters["full_attention"]["rope_theta"]
    attach(model, "none", keep_absolute=False)
    assert (states(model) - expected).abs().max() > 1e-3
    detach(model)
    close(states(attach(model, "rope", keep_absolute=False, base=base)), expected)


@pytest.mark.parametrize("name", NAMED)
def test_every_layer_and_pass_gets_a_gradient(name):
    model = attach(make(name), "tisa")
    gradients = train_step(model)[1]
    ours = {key: gradient for key, gradient in gradients.items() if "whereformer." in key}
    assert len(ours) == (6 if name == "t5" else 3)
    for gradient in ours.values():
        assert len(gradient) == (2 if name == "t5" else 3)
        assert (gradient.flatten(1).abs().amax(1) > 0).all()


@pytest.mark.parametrize("position", ["tisa", "none"])
@pytest.mark.parametrize("name", SWITCHABLE)
def test_nothing_is_left_without_a_gradient_when_positions_are_off(name, position):
    """Data-parallel training stops at parameters that no gradient reaches."""
    before = {key for key, gradient in train_step(make(name))[1].items() if gradient is None}
    model = attach(make(name), position, keep_absolute=False)
    after = {key for key, gradient in train_step(model)[1].items() if gradient is None}
    assert after <= before


@pytest.mark.parametrize("name", [name for name in SWITCHABLE if name not in ("gpt2", "llama")])
def test_without_positions_a_model_reads_a_bag(name):
    model = make(make_global_modernbert() if name == "modernbert" else name)
    order = torch.randperm(12)
    encoder = model.encoder if name == "t5" else model
    ids = torch.randint(3, 50, (2, 12))

    def run(ids):
        return encoder(ids).last_hidden_state

    before = run(ids)[:, order], run(ids[:, order])
    attach(model, "none", keep_absolute=False)
    after = run(ids)[:, order], run(ids[:, order])
    assert (before[0] - before[1]).abs().max() > 1e-3
    close(*after)


@pytest.mark.parametrize("name", ["bert", "albert", "roberta", "electra", "distilbert", "modernbert"])
def test_without_absolute_positions_no_length_is_too_long(name):
    model = attach(make(name), "tisa", keep_absolute=False)
    assert torch.isfinite(states(model, batch(model, length=60))).all()


@pytest.mark.parametrize("length", [12, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bert", "t5", "modernbert"])
def test_half_precision(name, length):
    model = attach(make(name), "tisa+shaw+floater", keep_absolute=name == "t5")
    inputs = batch(model, length=length)
    expected = states(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = states(model, inputs)
        mixed.float().pow(2).sum().backward()
    half = states(model.to(torch.bfloat16), inputs)
    for found in (mixed, half):
        assert (found.float() - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_dropout_drops_attention_weights():
    bert = make("bert")
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    drops = [layer.attention.self.dropout for layer in bert.encoder.layer]
    attach(bert, "tisa")
    expected = states(bert.eval())
    for p, same in ((0.0, True), (0.5, False)):
        for module in drops:
            module.p = p
        assert torch.allclose(states(bert.train()), expected, atol=1e-4) == same


@pytest.mark.parametrize("name", NAMED)
def test_attention_weights_are_real(name):
    theirs = make(name)
    switch(theirs, "eager")
    ours = attach(make(name), "none")
    inputs = batch(ours)
    options = {"output_attentions": True}
    expected, found = (model(**inputs, **options) for model in (theirs, ours))
    for kind in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if hasattr(expected, kind) and getattr(expected, kind) is not None:
            assert len(getattr(found, kind)) == len(getattr(expected, kind))
            assert kind == "cross_attentions" or len(getattr(found, kind)) > 0
            for mine, their in zip(getattr(found, kind), getattr(expected, kind), strict=True):
                if name != "t5":
                    mine, their = (
                        weights.transpose(1, 2)[inputs["attention_mask"].bool()] for weights in (mine, their)
                    )
                close(mine, their)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_weights_by_the_configuration_are_refused_before_anything_is_trained(name):
    """transformers runs such a model, but does not save it."""
    model = make(name)
    switch(model, "eager")
    part = model.encoder if name == "t5" else model
    part.config.output_attentions = True
    with pytest.raises(InputError, match=r"^config.output_attentions: .* False and pass output_attentions=True in"):
        attach(model, "none")
    part.config.output_attentions = False
    outputs = attach(model, "none")(**batch(model), output_attentions=True)
    assert len(outputs["encoder_attentions" if name == "t5" else "attentions"]) > 1

    # What transformers advises for an attached model does not end in silence.
    with pytest.raises(ValueError, match="set it to 'eager' instead"):
        model.config.output_attentions = True
    switch(model, "eager")
    with pytest.raises(RuntimeError, match=r"^attn_implementation: .*pass output_attentions=True in the call"):
        model(**batch(model))


@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_pairs(additive):
    """Two texts in a row that may not see each other, as a bool mask or as one that is added."""
    model = attach(make("bert"), "tisa")
    ids = torch.randint(3, 50, (1, 12))
    document = torch.arange(12) // 7
    mask = (document[:, None] == document)[None, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    packed = model(ids, attention_mask=mask, position_ids=torch.cat((torch.arange(7), torch.arange(5)))[None])
    alone = [model(ids[:, :7]).last_hidden_state, model(ids[:, 7:]).last_hidden_state]
    close(packed.last_hidden_state, torch.cat(alone, 1))


def test_another_implementation_is_refused():
    """It would leave positions out without a word."""
    model = attach(make("bert"), "tisa")
    expected = states(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"^attn_implementation: expected 'whereformer' while .*, got 'sdpa'"):
        states(model)
    model.set_attn_implementation("whereformer")
    torch.testing.assert_close(states(model), expected, rtol=0, atol=0)


# T5


def t5_batch():
    torch.manual_seed(2)
    ids, labels = torch.randint(3, 50, (3, 150)), torch.randint(3, 50, (3, 140))
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5_with_its_own_biases_as_a_table_is_t5(implementation):
    theirs = make(make_t5(transformers.T5ForConditionalGeneration))
    switch(theirs, implementation)
    ours = attach(copy.deepcopy(theirs), "none")
    expected, found = (model.double().train()(**t5_batch()) for model in (theirs, ours))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)
    expected.loss.backward()
    found.loss.backward()
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, their.grad, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.parametrize(("distance", "exact"), [(8, 8), (16, 16)])
def test_a_t5_without_logarithmic_buckets_is_refused(distance, exact):
    """There transformers itself divides 0 by 0 at this distance: the encoder's first, then the decoder's."""
    model = make(make_t5(relative_attention_max_distance=distance))
    reason = rf"expected more than {exact} \(the exact buckets\), got {distance}"
    with pytest.raises(InputError, match=f"^relative_attention_max_distance: {reason}$"):
        attach(model, "none")
    with pytest.raises(IndexError, match="out of range"):
        model(**dict.fromkeys(("input_ids", "decoder_input_ids"), torch.randint(3, 50, (1, distance + 1))))


def test_t5_hands_on_a_table_and_no_matrix():
    model = attach(make("t5"), "none")
    seen = []
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.register_forward_hook(lambda module, args, output: seen.append(tuple(output[1].shape)))
    states(model)
    assert set(seen) == {(1, 2, 1, 257), (1, 2, 1, 1)}


@pytest.mark.parametrize("position", ["none", "tisa"])
def test_t5_generates_the_same_with_and_without_a_cache(position):
    model = make(make_t5(transformers.T5ForConditionalGeneration))
    inputs = {"input_ids": torch.randint(3, 50, (2, 9)), "max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    before = model.generate(**inputs)
    attach(model, position)
    with_cache, without = model.generate(**inputs), model.generate(**inputs, use_cache=False)
    assert torch.equal(with_cache, without)
    if position == "none":
        assert torch.equal(with_cache, before)
    with pytest.raises(ValueError, match="static"):
        model.generate(**inputs, cache_implementation="static")


def test_t5_may_have_other_positions_instead():
    model = make("t5")
    attach(model, "t5", keep_absolute=False)
    assert not any("relative_attention_bias" in name for name in model.state_dict())
    with torch.no_grad():
        for stack, table in ((model.encoder, 0), (model.decoder, 1)):
            own = make("t5")
            source = (own.encoder, own.decoder)[table].block[0].layer[0].SelfAttention.relative_attention_bias.weight
            stack.whereformer.weight.copy_(source.mT)
    close(states(model), states(make("t5")))


# Training


# Each model, each method and each way of recomputing once every day, and all of them together among the slow tests.
CHECKPOINTED = [
    (name, position, reentrant)
    for name in ("bert", "t5", "modernbert")
    for position in ("tisa", "tupe+t5", "floater+shaw")
    for reentrant in (False, True)
]
QUICK_CHECKPOINTED = [("bert", "floater+shaw", False), ("t5", "tupe+t5", True), ("modernbert", "tisa", False)]


@pytest.mark.parametrize(
    ("name", "position", "reentrant"),
    [case if case in QUICK_CHECKPOINTED else pytest.param(*case, marks=pytest.mark.slow) for case in CHECKPOINTED],
)
def test_gradient_checkpointing(name, position, reentrant):
    if name == "t5":
        position = position.replace("tupe+t5", "tupe")
    model = attach(make(name), position)
    loss, gradients = train_step(model)
    checkpoint_activations(model, use_reentrant=reentrant)
    again, found = train_step(model)
    close(again, loss)
    assert gradients.keys() == found.keys()
    for key, gradient in gradients.items():
        if gradient is not None:
            close(found[key], gradient, factor=10)


# RoBERTa's and ELECTRA's layers are BERT's.
COMPILED = [(name, "tisa") for name in NAMED if (name not in ("roberta", "electra") if EVERY else name == "t5")]


@pytest.mark.parametrize(
    ("name", "position"), [("bert", "rope+shaw"), *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED)]
)
def test_compiles_whole(name, position):
    torch.compiler.reset()
    model = attach(make(name), position)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (12, 17) if name in ("bert", "t5", "modernbert") else (12,):
        inputs = batch(model, length=length)
        close(states(compiled, inputs), states(model, inputs))


@pytest.mark.slow
def test_compiles_to_code_with_gradients():
    torch.compiler.reset()
    small = transformers.BertModel(transformers.BertConfig(**SIZES | {"num_hidden_layers": 1}), add_pooling_layer=False)
    model = attach(make(small), "tisa")
    loss, gradients = train_step(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    again, found = train_step(compiled)
    close(again, loss)
    for key, gradient in gradients.items():
        if gradient is not None:
            close(found[f"_orig_mod.{key}"], gradient, factor=10)


def test_trains_with_the_trainer(tmp_path):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    attach(model, "tisa", keep_absolute=False)
    before = model.bert.whereformer.center.detach().clone()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 50, (8, 12))]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, save_steps=1, disable_tqdm=True, **{training_option(): True}
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert (model.bert.whereformer.center != before).flatten(1).any(1).all()
    ids = torch.stack([row["input_ids"] for row in rows])
    model.eval()
    reloaded = load_attached(tmp_path / "checkpoint-2", transformers.AutoModelForMaskedLM)
    torch.testing.assert_close(reloaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(model.eval()(ids).logits, reloaded(ids).logits, rtol=1e-4, atol=1e-5)


# Files and copies


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", NAMED)
def test_saves_and_loads(name, keep, tmp_path):
    position = "tisa" if keep and name == "modernbert" else "tisa+rope"
    model = attach(make(name), position, keep_absolute=keep, num_kernels=3)
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path, transformers.AutoModel)
    assert type(loaded) is type(model)
    assert loaded.config.whereformer == model.config.whereformer
    assert not loaded.training
    torch.testing.assert_close(states(loaded), states(model), rtol=0, atol=0)
    assert list(loaded.state_dict()) == list(model.state_dict())


def test_pickles_are_not_opened(tmp_path, monkeypatch):
    model = attach(make("bert"), "tisa")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("opened a pickle"))
    for options in ({}, {"use_safetensors": False}):
        with pytest.raises(OSError, match="safetensors"):
            load_attached(tmp_path, transformers.AutoModel, **options)


def test_a_method_that_is_too_large_to_count_is_refused(tmp_path):
    attach(make("bert"), "synthesizer", content="add").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["whereformer"]["options"]["max_length"] = 2**30
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"^path_or_id: .*too large to build"):
        load_attached(tmp_path, transformers.AutoModel)


def test_heads_change_and_files_are_split(tmp_path, caplog):
    torch.manual_seed(0)
    model = attach(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval(), "tisa")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for model_class in (transformers.AutoModelForTokenClassification, transformers.BertModel):
        with caplog.at_level(logging.WARNING):
            loaded = load_attached(tmp_path, model_class, dtype=torch.float64)
        own = loaded if model_class is transformers.BertModel else loaded.bert
        torch.testing.assert_close(own.whereformer.center, model.bert.whereformer.center.double())
        assert ("classifier.weight" in caplog.text) is not (model_class is transformers.BertModel)
        caplog.clear()
    own.save_pretrained(tmp_path / "base")
    again = load_attached(tmp_path / "base", transformers.AutoModelForMaskedLM, dtype=torch.float32)
    torch.testing.assert_close(again.bert.whereformer.center, model.bert.whereformer.center)


@pytest.mark.parametrize("name", ["whereformer.amplitude", "encoder.layer.0.attention.self.query.weight"])
def test_weights_in_other_numbers_are_refused(name, tmp_path):
    attach(make("bert"), "tisa").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name].to(torch.int64)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        InputError, match=rf"^checkpoint: '{name}' is torch.int64, expected floating-point numbers of 16"
    ):
        load_attached(tmp_path, transformers.AutoModel)


def test_loading_what_was_not_attached(tmp_path):
    model = make("bert")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"^path_or_id: nothing was attached"):
        load_attached(tmp_path / "plain", transformers.AutoModel)
    model.config.whereformer = {"position": "tisa", "keep_absolute": True, "options": {}}
    model.save_pretrained(tmp_path / "lost")
    with pytest.raises(ValueError, match=r"^path_or_id: expected 90 values for 'tisa', got 0$"):
        load_attached(tmp_path / "lost", transformers.AutoModel)
    for kind in (transformers.RobertaModel, transformers.GPT2Model, nn.Linear):
        with pytest.raises(InputError, match=rf"^model_class: expected a class .* for 'bert', got {kind.__name__}$"):
            load_attached(tmp_path / "lost", kind)
    attach(model, "tisa", share_layers=True)
    model.config.whereformer["options"] = {}
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"^path_or_id: expected 90 values for 'tisa', got 30$"):
        load_attached(tmp_path / "other", transformers.AutoModel)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 10**9}, "num_labels: expected at most 65536, got 1000000000"),
        ({"hidden_size": 16.0}, "path_or_id: its config.json does not describe a model (StrictDataclass"),
        ({"hidden_size": [[[]]]}, "path_or_id: its config.json does not describe a model (StrictDataclass"),
        (
            {"whereformer": {"position": "tisa", "keep_absolute": "no", "options": {}}},
            "keep_absolute: expected True or False, got 'no'",
        ),
        (
            {"whereformer": {"position": "tupe", "keep_absolute": True, "options": {"max_length": 2**31 - 1}}},
            "path_or_id: expected 34",
        ),
    ],
)
def test_a_configuration_of_other_hands_is_refused(fields, message, tmp_path):
    attach(make("bert"), "tisa").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(InputError) as caught:
        load_attached(tmp_path, transformers.AutoModel)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_a_number_that_ends_in_layers_may_be_of_other_layers(name, tmp_path):
    """max_window_layers of Qwen is 28, whatever the number of layers."""
    config = getattr(transformers, f"{name}Config")(**SIZES | {"num_hidden_layers": 2}, num_key_value_heads=1)
    model = attach(getattr(transformers, f"{name}Model")(config).eval(), "tisa")
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path, type(model)).eval()
    ids = torch.randint(3, 50, (2, 9))
    assert torch.equal(loaded(ids)[0], model(ids)[0])
    file = tmp_path / "config.json"
    described = json.loads(file.read_text())
    too_many = (
        rf"^checkpoint: it has {len(model.state_dict())} tensors, but its config.json describes a model with more than"
    )
    for layers, message in (
        (900, too_many),
        (10**9, "^num_hidden_layers: expected at most 1000 layers, got 1000000000$"),
    ):
        file.write_text(json.dumps({**described, "num_hidden_layers": layers, "layer_types": None}))
        with pytest.raises(InputError, match=message):
            load_attached(tmp_path, type(model))
    file.write_text(json.dumps({**described, "text_config": {"num_hidden_layers": 10**9}}))
    with pytest.raises(InputError, match=r"^num_hidden_layers: expected at most 1000 layers"):
        load_attached(tmp_path, type(model))


def test_layers_that_are_not_in_the_checkpoint_are_refused(tmp_path):
    attach(make("bert"), "tisa").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if ".query." not in name}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"^path_or_id: the checkpoint has no 'encoder.layer.0.*, so it was not"):
        load_attached(tmp_path, transformers.AutoModel)


# Detaching


def structure(model):
    """All that attaching may change."""
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    configs = [part.config.to_dict() for part in model.modules() if hasattr(part, "config")]
    return list(map(type, model.modules())), hooks, attributes, list(model.state_dict()), configs


@pytest.mark.parametrize("implementation", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", SWITCHABLE)
def test_detaching_restores_the_model(name, keep, implementation):
    model = make(name)
    switch(model, implementation)
    before, expected, parameters = structure(model), states(model), list(model.parameters())
    attach(model, "tisa", keep_absolute=keep)
    assert structure(model) != before
    assert detach(model) is model
    assert structure(model) == before
    assert all(mine is their for mine, their in zip(model.parameters(), parameters, strict=True))
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {implementation}
    torch.testing.assert_close(states(model), expected, rtol=0, atol=0)
    attach(model, "shaw")


def test_detached_parts_follow_where_the_model_went():
    for name in ("bert", "modernbert", "t5"):
        model = attach(make(name), "tisa", keep_absolute=False).double()
        detach(model)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        close(states(model), states(make(name).double()))


def test_a_failed_attach_leaves_the_model_alone(monkeypatch):
    model = make("bert")
    before, expected = structure(model), states(model)

    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr("whereformer.positions.tisa.Tisa.train", fail)
    with pytest.raises(RuntimeError, match="no"):
        attach(model, "tisa", keep_absolute=False)
    assert structure(model) == before
    torch.testing.assert_close(states(model), expected, rtol=0, atol=0)


# Errors

FUNNEL = {"vocab_size": 50, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}


@pytest.mark.parametrize(
    ("model", "instead"),
    [
        (
            lambda: transformers.FunnelModel(transformers.FunnelConfig(**FUNNEL)),
            "; whereformer.load_pretrained converts it to an encoder that accepts any method",
        ),
        (lambda: Encoder(EncoderConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, blocks="1")), ""),
    ],
)
def test_models_that_do_not_dispatch(model, instead, caplog):
    message = rf"^model: \w+ does not dispatch attention through AttentionInterface{instead}$"
    with pytest.raises(ValueError, match=message):
        attach(model(), "tisa")
    assert not caplog.text


@pytest.mark.parametrize(
    ("error", "message", "position", "options"),
    [
        (ValueError, "position: unknown position method 'tsia'; did you mean 'tisa'", "tsia", {}),
        (TypeError, "position: expected the name of a method, got None", None, {}),
        (TypeError, "position 'tisa' has no option 'kernels'", "tisa", {"kernels": 3}),
        (ValueError, "position: Learned acts on the embeddings", "learned", {}),
        (ValueError, "position: Sinusoidal acts on the embeddings", "tisa+sinusoidal", {}),
        (ValueError, r"position: it replaces query \. key", "synthesizer", {}),
        (ValueError, "num_heads: the model fixes this at 2; leave", "tisa", {"num_heads": 4}),
        (ValueError, "causal: the model fixes this at False", "tisa", {"causal": True}),
    ],
)
def test_bad_methods(error, message, position, options):
    model = make("bert")
    before = structure(model)
    with pytest.raises(error, match=rf"^{message}"):
        attach(model, position, **options)
    assert structure(model) == before


def test_models_of_text_and_images_get_a_method_for_their_text():
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 50, "eos_token_id": 49},
        vision_config={**tower, "image_size": 32},
        projection_dim=8,
    )
    model = make(transformers.CLIPModel(config))
    inputs = {"input_ids": torch.randint(3, 49, (2, 7)), "pixel_values": torch.randn(2, 3, 32, 32)}
    inputs["input_ids"][:, -1] = 49
    expected = model(**inputs).logits_per_image
    with pytest.raises(InputError, match=r"^model: CLIPModel did not .* to a part of it: text_model$"):
        attach(model, "tisa")
    with pytest.raises(InputError, match=r"^model: expected a text model, or an audio model .* reads 'pixel_values'$"):
        attach(model.vision_model, "tisa")
    attach(model.text_model, "tisa")
    assert (model(**inputs).logits_per_image - expected).abs().max() > 1e-3
    nn.init.zeros_(model.text_model.whereformer.amplitude)
    close(model(**inputs).logits_per_image, expected)


def test_bad_models():
    with pytest.raises(TypeError, match=r"^model: expected a PreTrainedModel of transformers, got Linear$"):
        attach(nn.Linear(2, 2), "tisa")
    model = make("bert")
    with pytest.raises(ValueError, match=r"^model: no position method is attached to this BertModel$"):
        detach(model)
    attach(model, "tisa")
    with pytest.raises(ValueError, match=r"^model: a position method is attached already; call whereformer.detach"):
        attach(model, "none")
    detach(model)
    with pytest.raises(ValueError, match=r"^model: no position method"):
        detach(model)
    with pytest.raises(ValueError, match=r"^keep_absolute: BartModel has no positions that attach can"):
        attach(make("bart"), "tisa", keep_absolute=False)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4}
    with pytest.raises(InputError, match=r"^keep_absolute: GPTJModel does not run without its positions; keep_abs"):
        attach(transformers.GPTJModel(transformers.GPTJConfig(**sizes)), "tisa", keep_absolute=False)
    with pytest.raises(
        InputError, match=r"^position: the layers of \w+ differ in the number or width of heads; expected 'none', got"
    ):
        attach(INKLING.make(swa_num_attention_heads=2), "tisa")


HEADS = {
    "multiple choice": (transformers.BertForMultipleChoice, "bert", "tisa", {"input_ids": (2, 3, 7)}),
    "T5's classifier": (transformers.T5ForSequenceClassification, "t5", "none", {"input_ids": (2, 7)}),
    "BART's classifier": (transformers.BartForSequenceClassification, "bart", "tisa", {"input_ids": (2, 7)}),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_take_inputs_of_another_form(name, tmp_path):
    """Their layers are found by running the base model."""
    kind, base, position, shapes = HEADS[name]
    model = make(kind(MODELS[base]().config))
    ids = {each: torch.randint(3, 50, shape) for each, shape in shapes.items()}
    for each in ids.values():
        each[..., -1] = model.config.eos_token_id if base != "bert" else 3
    before = model(**ids).logits
    after = attach(model, position)(**ids).logits
    assert torch.allclose(after, before, rtol=1e-4, atol=1e-4) == (position == "none")
    model.save_pretrained(tmp_path)
    close(load_attached(tmp_path, kind).eval()(**ids).logits, after)
    close(detach(model)(**ids).logits, before)
