"""Encoders whose layers have windows, beside what test_funnel and test_options say of their numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whereformer import Electra, ElectraPretrainingConfig, Encoder, EncoderConfig

from .peers import enlarge
from .test_encoder import SMALL

SIZES = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 40, "type_vocab_size": 0}


def make(position="tisa", kind=Encoder, **changes):
    """An encoder with parameters so large that each one matters."""
    torch.manual_seed(0)
    config = ElectraPretrainingConfig if kind is Electra else EncoderConfig
    return enlarge(kind(config(position=position, **{**SIZES, **changes})).double(), 0.1)


def words(batch=3, length=17):
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def step(model, inputs):
    """The states, and the gradients of every parameter, by name."""
    model.zero_grad()
    hidden = model(**inputs).last_hidden_state
    hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=hidden.dtype))
    return hidden.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


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
