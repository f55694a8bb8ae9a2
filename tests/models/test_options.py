"""The options of layers, one by one and together, against an encoder that is written out; and the presets."""

import re

import pytest
import torch
from torch.nn import functional

from whereformer import (
    Encoder,
    EncoderConfig,
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    load_pretrained,
)
from whereformer.models.config import PRESETS
from whereformer.models.heads import mean_states

from .funnels import written_out
from .peers import enlarge
from .test_encoder import SMALL

SIZES = {**SMALL, "intermediate_size": 20, "max_position_embeddings": 40}
MODERN = {"norm": "pre", "first_norm": False, "feed_forward": "gated", "biases": False, "type_vocab_size": 0}
ALL = {**MODERN, "sinks": True, "attention_scale": 0.3}
FUNNEL = {"blocks": "2-1x2-1", "decoder_layers": "1"}
OPTIONS = {
    "as it is": {},
    "geglu": {"feed_forward": "gated"},
    "swiglu": {"feed_forward": "gated", "hidden_act": "silu"},
    "no biases": {"biases": False},
    "no first norm": {"norm": "pre", "first_norm": False},
    "no first norm, shared": {"norm": "pre", "first_norm": False, "blocks": "1x3"},
    "scale": {"attention_scale": 1.0},
    "sinks": {"sinks": True},
    "causal": {"causal": True},
    "causal with windows": {"causal": True, "windows": "2,0"},
    "all": {**ALL, "windows": "0,3", "causal": True},
    **{f"all in a funnel with {name}": {**ALL, **FUNNEL, "position": name} for name in ("rope+t5", "transformer_xl")},
    "all in shared layers": {**ALL, "blocks": "1x3", "position": "rope+t5"},
}


def build(kind=Encoder, **options):
    """A model in float64, with parameters so large that each one matters."""
    torch.manual_seed(0)
    return enlarge(kind(EncoderConfig(**{**SIZES, "blocks": "3", "position": "learned", **options})).double())


def batch(length):
    """Four rows: a whole one, two with padding on either side, and one of padding only."""
    torch.manual_seed(length)
    mask = torch.ones(4, length, dtype=torch.long)
    mask[1, length // 2 + 1 :] = 0
    mask[2, : length // 2] = 0
    mask[3] = 0
    return {"input_ids": torch.randint(1, 50, (4, length)), "attention_mask": mask}


def gradients(states, model):
    torch.manual_seed(3)
    loss = sum((torch.randn_like(state) * state).sum() for state in states)
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_states_and_gradients_are_those_written_out(options, length):
    model, inputs = build(**options), batch(length)
    states = model(**inputs, output_hidden_states=True).hidden_states
    expected = written_out(model, **inputs)
    assert len(states) == len(expected) == len(model.passes) + 1 + model.has_decoder
    for state, expected_state in zip(states, expected, strict=True):
        torch.testing.assert_close(state, expected_state, rtol=1e-9, atol=1e-10)
    for (name, _), grad, expected_grad in zip(
        model.named_parameters(), gradients(states, model), gradients(expected, model), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("options", [OPTIONS["all"], PRESETS["modernbert"]], ids=str)
def test_bfloat16_is_near_float64(options):
    model, inputs = build(**options), batch(9)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        actual = model.bfloat16()(**inputs).last_hidden_state
    assert actual.dtype == torch.bfloat16
    assert float((actual.double() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_norm": False}, "first_norm: False needs norm 'pre', got 'post'"),
        ({"feed_forward": "glu"}, "feed_forward: expected one of plain, gated, got 'glu'"),
        ({"biases": 1}, "biases: expected True or False, got 1"),
        ({"attention_scale": -1.0}, "attention_scale: expected 0 to 1000, got -1.0"),
        ({"causal": True, "blocks": "2-2"}, "causal: pooling mixes a token with the next"),
        ({"classifier_pooling": "mean", "blocks": "2-2"}, "classifier_pooling: 'mean' needs one block"),
        (
            {"attention_scale": 1.0, "position": "synthesizer"},
            "attention_scale: expected None with a position method that replaces queries and keys, got 1.0",
        ),
    ],
)
def test_contradictions_are_one_line(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}[^\n]*$"):
        Encoder(EncoderConfig(**{**SIZES, **options}))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_model(name, tmp_path):
    model = EncoderForMaskedLM(EncoderConfig.preset(name, **SIZES)).eval()
    assert {field: getattr(model.config, field) for field in PRESETS[name]} == {
        **PRESETS[name],
        **{field: 0.0 for field in PRESETS[name] if field.endswith("dropout_prob")},
    }
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    inputs = batch(9)
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)
    assert again.loading_report.initialized == ()


def test_changes_win_over_a_preset():
    config = EncoderConfig.preset("modernbert", blocks="2", norm="post", first_norm=True)
    assert (config.windows, config.position_options) == ("0,64,64", {"base": [160_000.0, 10_000.0, 10_000.0]})
    config = EncoderConfig.preset("modernbert", position="tisa", position_options={"num_kernels": 3}, windows="5")
    assert (config.position_options, config.windows) == ({"num_kernels": 3}, "5")
    assert EncoderConfig.preset("modernbert", position="tisa").position_options == {}
    joined = EncoderConfig.preset("modernbert", position="tisa+rope", blocks="2")
    assert joined.position_options == {"base": [160_000.0, 10_000.0, 10_000.0]}
    assert EncoderConfig.preset("modernbert", hidden_size=768).intermediate_size == 2048
    assert EncoderConfig.preset("modernbert", blocks="1-1", decoder_layers="1").windows == "0,64,64"
    with pytest.raises(ValueError, match=r"^preset: expected one of bert, albert, .*, got 'roberta'$"):
        EncoderConfig.preset("roberta")
    with pytest.raises(ValueError, match=r"^first_norm: False needs norm 'pre', got 'post'$"):
        EncoderConfig.preset("modernbert", norm="post")


@pytest.mark.parametrize(
    ("position", "scaled"),
    [("shaw", True), ("transformer_xl", True), ("deberta", True), ("tisa", False), ("tupe", False), ("fox", False)],
)
def test_the_scale_of_what_positions_add(position, scaled):
    """Either all of a score has it, or what does not depend on the keys is as it was."""
    model = build(position=position, blocks="1")
    attention = model.layers[0].attention
    if not scaled:
        with torch.no_grad():
            attention.key.weight.zero_()
            attention.key.bias.zero_()

    def scores(scale, **inputs):
        attention.scale = scale
        weights = model(torch.arange(1, 8)[None], output_attentions=True, **inputs).attentions[0]
        return weights.log() - weights.log()[..., :1]

    usual = model.config.head_dim**-0.5
    factor = 3.0 if scaled else 1.0
    torch.testing.assert_close(scores(3 * usual), factor * scores(None), rtol=1e-9, atol=1e-9)
    listed = scores(3 * usual, position_ids=torch.arange(7))
    torch.testing.assert_close(listed, scores(3 * usual), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_means_of_long_text_in_half_precision(packed, dtype):
    """Their sums are beyond float16, and bfloat16 has no number between 2048 and 2064."""
    hidden = (torch.randn(2, 2050, 4) + torch.tensor([60.0, 1.0, -1.0, 0.0])).to(dtype)
    mask = torch.ones(2, 2050)
    mask[1, 1001:] = 0
    documents = torch.zeros(2, 2050, dtype=torch.long) if packed else None
    means = mean_states(hidden, mask, documents)
    expected = torch.stack((hidden[0].double().mean(0), hidden[1, :1001].double().mean(0)))
    assert means.dtype == dtype
    # The nearest number, or the next one if the sum was rounded across the middle.
    torch.testing.assert_close(means.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_classifiers_with_a_norm_and_a_mean():
    options = {"classifier_norm": True, "num_labels": 3, "classifier_act": "gelu"}
    inputs = batch(9)
    inputs["attention_mask"][3, :2] = 1
    mean = build(EncoderForSequenceClassification, classifier_pooling="mean", **options)
    states = mean.encoder(**inputs).last_hidden_state

    def transformed(head, x):
        hidden = functional.gelu(functional.linear(x, head.dense.weight, head.dense.bias))
        return functional.layer_norm(hidden, (16,), head.norm.weight, head.norm.bias, 1e-12)

    real = inputs["attention_mask"].bool()
    pooled = torch.stack([state[row].mean(0) for state, row in zip(states, real, strict=True)])
    expected = functional.linear(transformed(mean.classifier, pooled), mean.classifier.out.weight)
    torch.testing.assert_close(mean(**inputs).logits, expected + mean.classifier.out.bias, rtol=0, atol=1e-10)
    # The same rows, packed.
    ids = torch.cat([row[keep] for row, keep in zip(inputs["input_ids"], real, strict=True)])[None]
    position_ids = torch.cat([torch.arange(9)[keep] for keep in real])[None]
    documents = torch.cat([torch.full((int(keep.sum()),), number) for number, keep in enumerate(real)])[None]
    packed = mean(input_ids=ids, position_ids=position_ids, document_ids=documents).logits
    torch.testing.assert_close(packed, mean(**inputs).logits, rtol=0, atol=1e-10)
    tokens = build(EncoderForTokenClassification, **options)
    states = transformed(tokens.transform, tokens.encoder(**inputs).last_hidden_state)
    torch.testing.assert_close(tokens(**inputs).logits, tokens.token_classifier(states), rtol=0, atol=1e-10)
