"""Transformer-XL's relative attention against its formula, between any two evenly spaced sequences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.positions.stack import HEADS, WIDTH, build
from whereformer import Positions, Site
from whereformer.kernels import attention_weights

LAYER = 2


def formula(position, query, key, query_positions, key_positions):
    """Scores pair by pair, (heads, n_q, n_k), of query and key (heads, n, head_dim)."""
    head_dim = query.shape[-1]
    frequencies = [10_000 ** (-2 * k / WIDTH) for k in range(WIDTH // 2)]
    kernel = position.kernel[LAYER].unflatten(-1, (HEADS, head_dim))
    content_bias, position_bias = position.content_bias[LAYER], position.position_bias[LAYER]
    scores = query.new_zeros(HEADS, query.shape[1], key.shape[1])
    for i, query_at in enumerate(query_positions.values().tolist()):
        for j, key_at in enumerate(key_positions.values().tolist()):
            angles = [(query_at - key_at) * frequency for frequency in frequencies]
            waves = query.new_tensor([*map(math.sin, angles), *map(math.cos, angles)])
            distance = torch.einsum("w,whd->hd", waves, kernel)
            has_cls = position.reset_cls and (query_at <= 0 or key_at <= 0)
            score = ((query[:, i] + content_bias) * key[:, j]).sum(-1)
            if not has_cls:
                score = score + ((query[:, i] + position_bias) * distance).sum(-1)
            scores[:, i, j] = score / head_dim**0.5
    return scores


@pytest.mark.parametrize("reset_cls", [False, True])
@pytest.mark.parametrize("form", ["shifted", "factorized"])
@given(
    starts=st.tuples(st.integers(-3, 2), st.integers(-3, 2)),
    strides=st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4])),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_it_is_the_formula(form, reset_cls, starts, strides, lengths):
    # Only the first token may be [CLS], which is at or before 0.
    positions = [
        Positions(start, max(stride, 1 - start), length)
        for start, stride, length in zip(starts, strides, lengths, strict=True)
    ]
    position = build("transformer_xl", form=form, reset_cls=reset_cls)
    query, key = (torch.randn(1, HEADS, length, WIDTH // HEADS, dtype=torch.float64) for length in lengths)
    site = position.with_shared(Site(*positions, LAYER))
    terms = position.content_terms(query, key, site)
    turned = position.transform_qkv(query, key, key, site)
    actual = attention_weights(*turned, terms, query_positions=positions[0], key_positions=positions[1])
    expected = formula(position, query[0], key[0], *positions).softmax(-1)
    torch.testing.assert_close(actual[0], expected, rtol=1e-9, atol=1e-9)


def test_a_window_holds_only_the_offsets_that_occur():
    position = build("transformer_xl")
    window = position.compute_shared(Site(Positions(-3, 4, 5), Positions(-1, 2, 10)))
    assert (window.first, window.step) == (-14, 2)
    assert window.waves.shape == (18, WIDTH)
