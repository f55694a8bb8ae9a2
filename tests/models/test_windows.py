"""Encoders whose layers have windows: equal to attention with a dense mask, and to none where windows see all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import whereformer
from whereformer import (
    DenseBias,
    Electra,
    ElectraPretrainingConfig,
    Encoder,
    EncoderConfig,
    EncoderForMaskedLM,
    load_pretrained,
)
from whereformer.kernels.terms import position_values
from whereformer.models import layers
from whereformer.positions import position_names

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "type_vocab_size": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FUNNEL = {"blocks": "2-1x2-2", "decoder_layers": "1", "windows": "4,5,8,4"}
SHAPES = [{"blocks": "3", "windows": "2,3,0"}, {"blocks": "1x3", "windows": "2,0"}, FUNNEL]


def make(position="tisa", kind=Encoder, **changes):
    """An encoder with parameters so large that each one matters."""
    torch.manual_seed(0)
    config = ElectraPretrainingConfig if kind is Electra else EncoderConfig
    model = kind(config(position=position, **{**SIZES, **changes})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def words(batch=3, length=17):
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def step(model, inputs):
    """The states, and the gradients of every parameter, by name."""
    model.zero_grad()
    hidden = model(**inputs).last_hidden_state
    hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=hidden.dtype))
    return hidden.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def with_dense_masks(query, key, value, terms, *, window, dropout_p, backend, **options):
    """Attention where a window is a matrix with -inf outside of it."""
    if window is not None:
        positions = (position_values(options[name]) for name in ("query_positions", "key_positions"))
        queries, keys = (tensor if tensor.dim() == 2 else tensor.unsqueeze(0) for tensor in positions)
        far = (queries[:, :, None] - keys[:, None, :]).abs() > window
        scores = torch.zeros(far.shape, dtype=value.dtype).masked_fill(far, -torch.inf).unsqueeze(1)
        terms = (*terms, DenseBias(scores.expand(-1, value.shape[1], -1, -1)))
    return whereformer.attention(query, key, value, terms, backend="reference", **options)


def check_with_dense_masks(model, inputs, monkeypatch):
    actual = step(model, inputs)
    monkeypatch.setattr(layers, "attention", with_dense_masks)
    expected = step(model, inputs)
    monkeypatch.undo()
    model.windows = (None,) * len(model.windows)
    everything = step(model, inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)
    assert (everything[0] - expected[0]).abs().max() > 1e-3


# Without terms, with rotations, and with each kind of term.
QUICK = ("none", "rope", "tisa", "shaw", "tupe", "transformer_xl", "fox", "learned+t5")


@pytest.mark.parametrize("backend", ["auto", pytest.param("blockwise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["blocks"])
@pytest.mark.parametrize(
    "position",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*position_names(), "learned+t5")
    ],
)
def test_a_window_is_a_mask(position, shape, backend, monkeypatch):
    model = make(position, attention_backend=backend, **shape)
    mask = torch.ones(3, 17, dtype=torch.int64)
    mask[1, 12:] = 0
    check_with_dense_masks(model, {"input_ids": words(), "attention_mask": mask}, monkeypatch)


@pytest.mark.parametrize("position", ["none", "t5", "rope", "alibi"])
def test_a_window_counts_positions(position, monkeypatch):
    model = make(position, **SHAPES[0])
    apart = torch.arange(17) * 3 // 2
    check_with_dense_masks(model, {"input_ids": words(), "position_ids": apart.expand(3, -1)}, monkeypatch)
    check_with_dense_masks(make(position, **FUNNEL), {"input_ids": words(), "position_ids": apart}, monkeypatch)


@pytest.mark.parametrize("shape", [{"blocks": "3"}, {"blocks": "2-2", "decoder_layers": "1"}], ids=str)
@pytest.mark.parametrize("position", ["none", "tisa", "transformer_xl"])
def test_a_window_that_sees_all_is_none(position, shape):
    inputs = {"input_ids": words()}
    expected = step(make(position, **shape), inputs)
    torch.testing.assert_close(step(make(position, windows="0", **shape), inputs), expected, rtol=0, atol=0)
    torch.testing.assert_close(step(make(position, windows="17", **shape), inputs), expected, rtol=1e-8, atol=1e-9)


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(lengths, st.integers(0, 5), st.integers(1, 9), st.sampled_from(["none", "tisa", "shaw", "rope"]), st.booleans())
def test_padding_never_changes_the_answer(lengths, padding, window, position, left):
    model, rows = make(position, blocks="2", windows=f"{window},{window + 1}"), words(len(lengths), 12)
    width = max(lengths) + padding
    ids, mask, position_ids = (torch.zeros(len(lengths), width, dtype=torch.int64) for _ in range(3))
    for row, length in enumerate(lengths):
        span = slice(width - length, width) if left else slice(length)
        ids[row, span], mask[row, span], position_ids[row, span] = rows[row, :length], 1, torch.arange(length)
    states = model(ids, mask, position_ids=position_ids).last_hidden_state
    for row, length in enumerate(lengths):
        alone = model(rows[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(states[row, mask[row].bool()], alone, rtol=1e-9, atol=1e-10)


def test_both_models_of_an_electra_have_the_windows():
    model = make(kind=Electra, blocks="2", windows="2,0", generator_size=0.5)
    for part in (model.generator.encoder, model.discriminator.encoder):
        assert part.windows == (2, None)
        assert (part(words(), output_attentions=True).attentions[0][0, 0].count_nonzero(-1) <= 5).all()


def test_windows_are_saved(tmp_path):
    model = make(kind=EncoderForMaskedLM, **SHAPES[0]).float()
    model.save_pretrained(tmp_path)
    for loaded in (
        EncoderForMaskedLM.from_pretrained(tmp_path).eval(),
        load_pretrained(tmp_path, model_class=EncoderForMaskedLM),
    ):
        assert loaded.config.windows == "2,3,0"
        torch.testing.assert_close(loaded.eval()(words()).logits, model(words()).logits, rtol=0, atol=0)
    without = load_pretrained(tmp_path, model_class=EncoderForMaskedLM, windows=None).eval()
    assert (without(words()).logits - model(words()).logits).abs().max() > 1e-3


def test_a_number_for_every_pass():
    def windows(**options):
        return EncoderConfig(**options).layer_windows()

    assert windows(blocks="3") == windows(blocks="3", windows="0") == (None,) * 3
    assert windows(blocks="5", windows="128, 64,0") == (128, 64, None, 128, 64)
    assert windows(blocks="1x2-2", decoder_layers="1x2", windows="2,4,8,16,32,64") == (2, 4, 8, 16, 32, 64)
    assert windows(blocks="2", windows=7) == (7, 7)
    # A decoder that is left out keeps its numbers.
    left_out = EncoderConfig(blocks="1-1", decoder_layers="2", windows="2,2,3", with_decoder=False)
    assert left_out.layer_windows() == (2, 2, 3, 2)
    assert Encoder(
        EncoderConfig(**SIZES, blocks="1-1", decoder_layers="2", windows="2,2,3", with_decoder=False)
    ).windows


@pytest.mark.parametrize(
    "windows",
    ["", "-1", "a", "1,,2", "1,", "1.5", "1 2", "1\n", "٣", "1" * 5000, "1," * 9999, -3],
    ids=lambda w: repr(w)[:9],
)
def test_strange_windows(windows):
    message = r"^windows: expected numbers as '128' or '128,128,0' \(0: no window\), got .{1,80}$"
    with pytest.raises(ValueError, match=message):
        EncoderConfig(windows=windows)


def test_windows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^windows: expected at most 2147483647, got 1000000000000$"):
        EncoderConfig(windows="2,1000000000000")
    assert EncoderConfig(blocks="2", windows="1,2,3").layer_windows() == (1, 2)
    reason = "expected at least 4 where pooled tokens are 4 positions apart, got 3"
    with pytest.raises(ValueError, match=rf"^windows: {reason}$"):
        EncoderConfig(blocks="1-1-1", windows="3")
    for value in (1.5, True, ["1"], {}):
        with pytest.raises(ValueError, match=r"^windows: expected numbers as '128' or .*, got "):
            EncoderConfig(windows=value)
