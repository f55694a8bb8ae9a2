"""Position methods in transformers' own models: outputs, gradients, weights, and training."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from tests.every import EVERY
from whereformer import attach, load_attached, load_pretrained
from whereformer.errors import InputError

from .checkpointing import checkpoint_activations, training_option
from .peers import (
    MODELS,
    NAMED,
    SIZES,
    SWITCHABLE,
    attach_unverified,
    batch,
    build,
    close,
    make,
    make_global_modernbert,
    make_t5,
    positions_of,
    states,
    switch,
    train_step,
)
from .test_attach_windows import MODELS as WINDOWED


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
    attach_unverified(ours, position, **({"share_layers": False} if "tisa" in position else {}))
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
    attach_unverified(bert, position, keep_absolute=False)
    encoder.position.load_state_dict(bert.whereformer.state_dict())
    inputs = batch(bert)
    close(states(bert, inputs), states(encoder, inputs))


@pytest.mark.parametrize("variant", ["random", "factorized_random", "dense", "factorized_dense"])
def test_a_synthesizer_reads_the_layers_input(variant, tmp_path):
    bert = make("bert")
    encoder = as_encoder(bert, "none", tmp_path)
    attach_unverified(bert, "synthesizer", keep_absolute=False, variant=variant, content="mix", max_length=20)
    encoder.position = copy.deepcopy(bert.whereformer)
    inputs = batch(bert)
    close(states(bert, inputs), states(encoder, inputs))


@pytest.mark.parametrize("name", NAMED)
def test_every_layer_and_pass_gets_a_gradient(name):
    model = attach_unverified(make(name), "tisa")
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
    model = attach_unverified(make(name), position, keep_absolute=False)
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
    attach_unverified(model, "none", keep_absolute=False)
    after = run(ids)[:, order], run(ids[:, order])
    assert (before[0] - before[1]).abs().max() > 1e-3
    close(*after)


@pytest.mark.parametrize("name", ["bert", "albert", "roberta", "electra", "distilbert", "modernbert"])
def test_without_absolute_positions_no_length_is_too_long(name):
    model = attach_unverified(make(name), "tisa", keep_absolute=False)
    assert torch.isfinite(states(model, batch(model, length=60))).all()


@pytest.mark.parametrize("length", [12, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bert", "t5", "modernbert"])
def test_half_precision(name, length):
    model = attach_unverified(make(name), "tisa+shaw+floater", keep_absolute=name == "t5")
    inputs = batch(model, length=length)
    expected = states(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = states(model, inputs)
        mixed.float().pow(2).sum().backward()
    halves = [states(model.to(dtype), inputs) for dtype in (torch.bfloat16, torch.float16)]
    for hidden in (mixed, *halves):
        assert (hidden.float() - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_dropout_drops_attention_weights():
    bert = make("bert")
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    drops = [layer.attention.self.dropout for layer in bert.encoder.layer]
    attach_unverified(bert, "tisa")
    expected = states(bert.eval())
    for p, same in ((0.0, True), (0.5, False)):
        for module in drops:
            module.p = p
        assert torch.allclose(states(bert.train()), expected, atol=1e-4) == same


@pytest.mark.parametrize("name", [*SWITCHABLE, "opt", "gpt_oss"])
def test_attention_weights_are_real(name):
    makers = {"opt": lambda: build("OPT", {**SIZES, "word_embed_proj_dim": 16}), "gpt_oss": WINDOWED["gpt_oss"]}
    theirs = make(makers[name]() if name in makers else name)
    ours = attach_unverified(copy.deepcopy(theirs), "none")
    switch(theirs, "eager")
    inputs = batch(ours)
    assert not ours(**inputs).get("attentions")
    options = {"output_attentions": True}
    expected, actual = (model(**inputs, **options) for model in (theirs, ours))
    for kind in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if hasattr(expected, kind) and getattr(expected, kind) is not None:
            assert len(getattr(actual, kind)) == len(getattr(expected, kind))
            assert kind == "cross_attentions" or len(getattr(actual, kind)) > 0
            for mine, their in zip(getattr(actual, kind), getattr(expected, kind), strict=True):
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


def test_another_implementation_is_refused():
    """It would leave positions out without a word."""
    model = attach_unverified(make("bert"), "tisa")
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
    ours = attach_unverified(copy.deepcopy(theirs), "none")
    expected, actual = (model.double().train()(**t5_batch()) for model in (theirs, ours))
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-9, atol=1e-9)
    expected.loss.backward()
    actual.loss.backward()
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
    model = attach_unverified(make("t5"), "none")
    shapes = []
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output[1].shape)))
    states(model)
    assert set(shapes) == {(1, 2, 1, 257), (1, 2, 1, 1)}


@pytest.mark.parametrize("position", ["none", "tisa"])
def test_t5_generates_the_same_with_and_without_a_cache(position):
    model = make(make_t5(transformers.T5ForConditionalGeneration))
    inputs = {"input_ids": torch.randint(3, 50, (2, 9)), "max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    before = model.generate(**inputs)
    attach_unverified(model, position)
    with_cache, without = model.generate(**inputs), model.generate(**inputs, use_cache=False)
    assert torch.equal(with_cache, without)
    if position == "none":
        assert torch.equal(with_cache, before)
    with pytest.raises(ValueError, match="static"):
        model.generate(**inputs, cache_implementation="static")


def test_t5_may_have_other_positions_instead():
    model = make("t5")
    attach_unverified(model, "t5", keep_absolute=False)
    assert not any("relative_attention_bias" in name for name in model.state_dict())
    with torch.no_grad():
        for stack, table in ((model.encoder, 0), (model.decoder, 1)):
            t5 = make("t5")
            source = (t5.encoder, t5.decoder)[table].block[0].layer[0].SelfAttention.relative_attention_bias.weight
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
    model = attach_unverified(make(name), position)
    loss, gradients = train_step(model)
    checkpoint_activations(model, use_reentrant=reentrant)
    again, gradients_again = train_step(model)
    close(again, loss)
    assert gradients.keys() == gradients_again.keys()
    for key, gradient in gradients.items():
        if gradient is not None:
            close(gradients_again[key], gradient, factor=10)


# RoBERTa's and ELECTRA's layers are BERT's.
COMPILED = [(name, "tisa") for name in NAMED if (name not in ("roberta", "electra") if EVERY else name == "t5")]


@pytest.mark.parametrize(
    ("name", "position"), [("bert", "rope+shaw"), *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED)]
)
def test_compiles_whole(name, position):
    torch.compiler.reset()
    model = make(build("Bert", {**SIZES, "num_hidden_layers": 2}) if name == "bert" else name)
    attach_unverified(model, position)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (12, 17) if name in ("bert", "t5", "modernbert") else (12,):
        inputs = batch(model, length=length)
        close(states(compiled, inputs), states(model, inputs))


@pytest.mark.slow
def test_compiles_to_code_with_gradients():
    torch.compiler.reset()
    small = transformers.BertModel(transformers.BertConfig(**SIZES | {"num_hidden_layers": 1}), add_pooling_layer=False)
    model = attach_unverified(make(small), "tisa")
    loss, gradients = train_step(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    again, compiled_gradients = train_step(compiled)
    close(again, loss)
    for key, gradient in gradients.items():
        if gradient is not None:
            close(compiled_gradients[f"_orig_mod.{key}"], gradient, factor=10)


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
