"""Each measurement, on methods of which the truth is known."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from whereformer import (
    DenseBias,
    Encoder,
    EncoderConfig,
    EncoderForMaskedLM,
    PositionRangeError,
    build_position,
    position_names,
)
from whereformer.positions.base import PositionMethod

FOLDER = Path(__file__).parents[1] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("the package is tested without its benchmarks", allow_module_level=True)
sys.path.insert(0, str(FOLDER))
try:
    measures = importlib.import_module("position_properties")
finally:
    sys.path.remove(str(FOLDER))
count_operations, curve_share = measures.count_operations, measures.curve_share
parameter_growth, reached_parameters = measures.parameter_growth, measures.reached_parameters
shift_change = measures.shift_change

INVARIANT = ["none", "shaw", "t5", "rope", "tisa", "alibi", "kerple", "deberta", "fox", "transformer_xl", "tisa+rope"]
ABSOLUTE = ["sinusoidal", "learned", "floater", "synthesizer", "tupe", "learned+tisa"]
LENGTH = 12


def config_of(position, **options):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "blocks": "2"} | options
    return EncoderConfig(vocab_size=30, position=position, max_position_embeddings=2 * LENGTH, **sizes)


def encoder_of(position, **options):
    return Encoder(config_of(position, **options)).eval()


def tokens(length=LENGTH, batch=3):
    return torch.randint(30, (batch, length), generator=torch.Generator().manual_seed(1))


class Planted(PositionMethod):
    """Adds given scores (heads, n, n) in every layer, but none where all tokens are at one position."""

    def __init__(self, model, scores):
        super().__init__(model)
        self.scores = scores

    def terms(self, hidden, site):
        together = isinstance(site.query_positions, torch.Tensor) and site.query_positions.unique().numel() == 1
        return (DenseBias(self.scores.unsqueeze(0) * (not together)),)


@pytest.mark.parametrize("position", INVARIANT)
def test_relative_methods_do_not_notice_a_shift(position):
    assert shift_change(encoder_of(position), tokens()) < 1e-9


@pytest.mark.parametrize("position", ABSOLUTE)
def test_absolute_methods_do(position):
    assert shift_change(encoder_of(position), tokens()) > 1e-4


def test_fire_notices_a_shift_beyond_its_threshold_only():
    encoder = encoder_of("fire")
    assert shift_change(encoder, tokens(), (1, 100)) < 1e-9
    assert shift_change(encoder, tokens(), (1, 1000)) > 1e-5


def test_shifts_out_of_range_are_left_out():
    encoder = encoder_of("learned")
    assert shift_change(encoder, tokens()) == shift_change(encoder, tokens(), (1, 10))
    with pytest.raises(PositionRangeError, match="got position 24"):
        shift_change(encoder, tokens(), (12,))


def test_the_encoder_is_left_as_it_was():
    encoder = encoder_of("tisa").train()
    before = {name: weight.clone() for name, weight in encoder.state_dict().items()}
    shift_change(encoder, tokens())
    curve_share(encoder, tokens())
    assert encoder.training
    assert all(torch.equal(weight, before[name]) for name, weight in encoder.state_dict().items())
    assert not any(module._forward_pre_hooks for module in encoder.modules())


@pytest.mark.parametrize("position", ["tisa", "t5", "alibi", "fire"])
def test_a_curve_explains_all_that_a_curve_does(position):
    assert curve_share(encoder_of(position), tokens()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("position", ["rope", "shaw", "learned", "transformer_xl", "synthesizer"])
def test_a_curve_explains_little_of_what_depends_on_tokens_or_places(position):
    assert 0 <= curve_share(encoder_of(position), tokens(batch=16)) < 0.7


def test_no_effect_has_no_share():
    assert curve_share(encoder_of("none"), tokens()) is None
    encoder = encoder_of("none")
    # The same for all keys of a query: the softmax ignores it.
    encoder.position = Planted(encoder.position.model, torch.randn(2, LENGTH, 1).expand(2, LENGTH, LENGTH).double())
    assert curve_share(encoder, tokens()) is None


def test_embeddings_act_on_every_layer_whose_input_they_are_a_summand_of():
    for norm in ("pre", "post"):
        two, one = encoder_of("learned", norm=norm), encoder_of("learned", norm=norm, blocks="1")
        one.load_state_dict(two.state_dict(), strict=False)
        assert (curve_share(one, tokens()) == pytest.approx(curve_share(two, tokens()))) == (norm == "post")


@given(seed=st.integers(0, 99), length=st.integers(2, 9), mix=st.floats(0, 1))
def test_the_share_is_that_of_the_best_curve_with_free_rows(seed, length, mix):
    """Checked by fitting a curve and a number for every row at once, which is the same by another way."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length)
    offsets = positions - positions[:, None] + length - 1
    curve = torch.randn(2, 2 * length - 1, generator=generator, dtype=torch.float64)
    scores = curve[:, offsets] * mix + torch.randn(2, length, length, generator=generator, dtype=torch.float64)
    encoder = encoder_of("none")
    encoder.position = Planted(encoder.position.model, scores)
    share = curve_share(encoder, tokens(length))
    rows = nn.functional.one_hot(positions.repeat_interleave(length), length)
    design = torch.cat((nn.functional.one_hot(offsets.flatten(), 2 * length - 1), rows), 1).double()
    target = scores.flatten(1).T
    residual = target - design @ torch.linalg.lstsq(design, target, driver="gelsd").solution
    total = (scores - scores.mean(-1, keepdim=True)).square().sum()
    assert share == pytest.approx(float(1 - residual.square().sum() / total), abs=1e-6)


def test_parameters_are_counted_at_berts_sizes_with_the_power_of_their_growth():
    growth = {name: parameter_growth(name) for name in ("tisa", "learned", "t5", "shaw", "synthesizer", "rope")}
    assert {name: count for name, (count, _) in growth.items()} == {
        "tisa": 12 * 12 * 15,
        "learned": 512 * 768,
        "t5": 12 * 32,
        "shaw": 12 * 2 * 33 * 64,
        "synthesizer": 12 * 12 * 512**2,
        "rope": 0,
    }
    powers = {name: power for name, (_, power) in growth.items()}
    assert powers == {"tisa": 0, "learned": 1, "t5": 0, "shaw": 0, "synthesizer": 2, "rope": 0}
    assert parameter_growth("tisa", num_kernels=1)[0] == 12 * 12 * 3
    assert parameter_growth("rope", sinks=True) == (12 * 12, 0)


def model_of(position, **fields):
    return EncoderForMaskedLM(config_of(position, **fields)).eval()


def test_gradients_reach_what_a_batch_uses():
    ids = tokens()
    # Half of the table's rows, of 16 numbers each.
    assert reached_parameters(model_of("learned"), ids, ids) == (LENGTH * 16, 2 * LENGTH * 16)
    assert reached_parameters(model_of("tisa"), ids, ids) == (2 * 2 * 5 * 3,) * 2
    assert reached_parameters(model_of("rope", sinks=True), ids, ids) == (2 * 2,) * 2


def test_gradients_reach_nothing_where_nothing_is_trained():
    ids = tokens()
    assert reached_parameters(model_of("rope"), ids, ids) == (0, 0)
    model = model_of("tisa")
    model.encoder.position.requires_grad_(False)
    assert reached_parameters(model, ids, ids) == (0, 0)
    model = model_of("none")
    model.encoder.position.unused = nn.Parameter(torch.ones(7))
    assert reached_parameters(model, ids, ids) == (0, 7)
    assert all(parameter.grad is None for parameter in model.parameters())


class OneAfterTheOther(PositionMethod):
    """Walks from position to position."""

    def embed(self, hidden, positions):
        state = torch.zeros_like(hidden[:, 0])
        rows = []
        for position in range(hidden.shape[1]):
            state = torch.tanh(state + hidden[:, position])
            rows.append(state)
        return torch.stack(rows, 1)


def test_a_walk_from_position_to_position_is_counted():
    model = build_position("none", hidden_size=8, num_heads=2, max_length=64).model
    short, long = (count_operations(OneAfterTheOther(model), length) for length in (16, 64))
    assert (long - short) % 48 == 0 < long - short


def test_floater_alone_walks():
    def grows(name):
        sizes = {"hidden_size": 8, "num_heads": 2}
        short, long = (count_operations(build_position(name, max_length=n, **sizes), n) for n in (8, 32))
        return long > short

    assert [name for name in position_names() if grows(name)] == ["floater"]
