"""RoPE's scaled frequencies against those of transformers, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, modeling_rope_utils

from tests.positions.stack import build
from whereformer import Positions, Site
from whereformer.positions.rope_scaling import Scaling

CPU = torch.device("cpu")


class InFloat64:
    """torch for code that asks for float32."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def theirs(parameters, base, dim, monkeypatch, *, longest=None, **arguments):
    """The frequencies and the attention factor of transformers, in a model for texts up to ``longest``."""
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=longest or parameters.get("original_max_position_embeddings", 64),
        rope_parameters={**parameters, "rope_theta": base},
    )
    with monkeypatch.context() as patch:
        patch.setattr(modeling_rope_utils, "torch", InFloat64())
        return modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU, **arguments)


def assert_same(parameters, base, dim, monkeypatch):
    actual = Scaling(parameters, rotary_dim=dim)
    expected, factor = theirs(parameters, base, dim, monkeypatch)
    torch.testing.assert_close(actual.frequencies(base, CPU), expected, rtol=1e-12, atol=0)
    assert actual.attention_factor == pytest.approx(factor, rel=1e-14)


dims = st.integers(2, 64).map(lambda half: 2 * half)
bases = st.floats(10.0, 1e6)
factors = st.floats(1.0, 64.0)
lengths = st.integers(16, 10**5)


@pytest.fixture(scope="module")
def monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@settings(max_examples=60, deadline=None)
@given(
    dim=dims,
    base=bases,
    factor=factors,
    length=lengths,
    betas=st.tuples(st.floats(2.1, 64.0), st.floats(0.1, 2.0)),
    factor_options=st.sampled_from([{}, {"attention_factor": 0.7}]),
)
def test_yarn(monkeypatch, dim, base, factor, length, betas, factor_options):
    numbers = {"factor": factor, "original_max_position_embeddings": length}
    parameters = {"rope_type": "yarn", **numbers, "beta_fast": betas[0], "beta_slow": betas[1], **factor_options}
    assert_same(parameters, base, dim, monkeypatch)


@settings(max_examples=40, deadline=None)
@given(dim=dims, base=bases, factor=factors, length=lengths, low=st.floats(0.5, 3.0), wider=st.floats(0.1, 9.0))
def test_llama3(monkeypatch, dim, base, factor, length, low, wider):
    bounds = {"low_freq_factor": low, "high_freq_factor": low + wider}
    numbers = {"factor": factor, "original_max_position_embeddings": length}
    assert_same({"rope_type": "llama3", **numbers, **bounds}, base, dim, monkeypatch)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    dim=dims,
    base=bases,
    length=st.integers(16, 4096),
    longest=st.integers(16, 10**5),
    factor_options=st.sampled_from([{}, {"factor": 8.0}, {"attention_factor": 0.7}]),
)
def test_longrope(monkeypatch, data, dim, base, length, longest, factor_options):
    """Theirs chooses the list by the text at hand: here it is the longest text."""
    lists = {
        name: data.draw(st.lists(st.floats(0.5, 64.0), min_size=dim // 2, max_size=dim // 2))
        for name in ("short_factor", "long_factor")
    }
    parameters = {"rope_type": "longrope", **lists, "original_max_position_embeddings": length, **factor_options}
    expected, factor = theirs(parameters, base, dim, monkeypatch, longest=longest, seq_len=longest)
    actual = Scaling(parameters, rotary_dim=dim, max_length=longest)
    # They compute the exponents in float32, whatever is asked for.
    torch.testing.assert_close(actual.frequencies(base, CPU), expected, rtol=2e-6, atol=0)
    assert actual.attention_factor == pytest.approx(factor, rel=1e-14)


@settings(max_examples=60, deadline=None)
@given(dim=dims, base=bases, factor=factors, part=st.sampled_from([None, 0.01, 0.3, 0.5, 0.99, 1.0]))
def test_linear_and_proportional(monkeypatch, dim, base, factor, part):
    numbers = {"rope_type": "linear"} if part is None else {"rope_type": "proportional", "partial_rotary_factor": part}
    assert_same({**numbers, "factor": factor}, base, dim, monkeypatch)


@settings(max_examples=20, deadline=None)
@given(dim=dims, base=bases, factor=st.integers(1, 32))
def test_ntk_is_the_dynamic_one_of_transformers_for_a_text_of_one_length(monkeypatch, dim, base, factor):
    """Theirs has the base for the length at hand: (factor * length / original - factor + 1) is ours for that length."""
    dynamic = {"rope_type": "dynamic", "factor": 1.0}
    expected, _ = theirs(dynamic, base, dim, monkeypatch, seq_len=64 * factor)
    actual = Scaling({"rope_type": "ntk", "factor": factor}, rotary_dim=dim).frequencies(base, CPU)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    plain = Scaling(None, rotary_dim=dim).frequencies(base, CPU)
    torch.testing.assert_close(actual[0], plain[0])
    torch.testing.assert_close(actual[-1], plain[-1] / factor)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_queries_and_keys_turn_by_these_angles_and_grow_by_the_factor(layout):
    parameters = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 3.0}
    position = build("rope", layout=layout, base=100.0, scaling=parameters)
    scaling = Scaling(parameters, rotary_dim=8)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(8) + 1)
    positions = Positions(3, 2, 5)
    query, key = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    for before, after in zip(
        (query, key), position.transform_qkv(query, key, key, Site(positions, positions)), strict=False
    ):
        pairs, turned = (
            features.unflatten(-1, (2, 4)).mT if layout == "half" else features.unflatten(-1, (4, 2))
            for features in (before, after)
        )
        angles = positions.values().double()[:, None] * scaling.frequencies(100.0, CPU)
        expected = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(torch.view_as_complex(turned.contiguous()), expected * scaling.attention_factor)
