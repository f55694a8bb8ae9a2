"""Transformer-XL's relative attention against its formula, between any two evenly spaced sequences."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.positions.stack import HEADS, WIDTH, build
from whereformer import Positions, Site
from whereformer.kernels import attention_weights
from whereformer.positions import transformer_xl

LAYER = 2


def formula(position, query, key, query_positions, key_positions):
    """Scores pair by pair, (heads, n_q, n_k), of query and key (heads, n, head_dim)."""
    head_dim = query.shape[-1]
    frequencies = [10_000 ** (-2 * k / WIDTH) for k in range(WIDTH // 2)]
    kernel = position.kernel[LAYER].unflatten(-1, (HEADS, head_dim))
    content, places = position.content_bias[LAYER], position.position_bias[LAYER]
    scores = query.new_zeros(HEADS, query.shape[1], key.shape[1])
    for i, here in enumerate(query_positions.values().tolist()):
        for j, there in enumerate(key_positions.values().tolist()):
            angles = [(here - there) * frequency for frequency in frequencies]
            waves = query.new_tensor([*map(math.sin, angles), *map(math.cos, angles)])
            distance = torch.einsum("w,whd->hd", waves, kernel)
            apart = position.reset_cls and (here <= 0 or there <= 0)
            score = ((query[:, i] + content) * key[:, j]).sum(-1)
            if not apart:
                score = score + ((query[:, i] + places) * distance).sum(-1)
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
    places = [
        Positions(start, max(stride, 1 - start), length)
        for start, stride, length in zip(starts, strides, lengths, strict=True)
    ]
    position = build("transformer_xl", form=form, reset_cls=reset_cls)
    query, key = (torch.randn(1, HEADS, length, WIDTH // HEADS, dtype=torch.float64) for length in lengths)
    site = position.share(Site(*places, LAYER))
    terms = position.content_terms(query, key, site)
    turned = position.rotate(query, key, key, site)
    found = attention_weights(*turned, terms, query_positions=places[0], key_positions=places[1])
    expected = formula(position, query[0], key[0], *places).softmax(-1)
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-9)


def test_a_window_holds_only_the_offsets_that_occur():
    position = build("transformer_xl")
    window = position.prepare_for(Site(Positions(-3, 4, 5), Positions(-1, 2, 10)))
    assert (window.first, window.last, window.step) == (-14, 20, 2)
    assert window.waves.shape == (18, WIDTH)


def test_layers_share_their_vectors_in_inference_alone():
    """With gradients a checkpointed layer must find nothing there that its first run left."""
    position = build("transformer_xl", passes=(0, 1, 1, 0))
    places = Positions(0, 1, 5), Positions(0, 1, 5)
    query = key = torch.randn(1, HEADS, 5, WIDTH // HEADS, dtype=torch.float64)
    window = position.prepare_for(Site(*places))
    with_gradients = position.content_terms(query, key, Site(*places, 1, window))[0].table
    assert not window.vectors
    with torch.no_grad():
        tables = [position.content_terms(query, key, Site(*places, layer, window))[0].table for layer in (1, 2, 0)]
    assert tables[0] is tables[1]
    assert torch.equal(tables[0], with_gradients)
    assert set(window.vectors) == {0, 1}
    assert position.content_terms(query, key, Site(*places, 1, window))[0].table.requires_grad


def test_sinusoids_are_made_once_for_each_window():
    position = build("transformer_xl")
    places, others = ((Positions(0, 1, n), Positions(0, 1, n)) for n in (5, 6))
    first = position.prepare_for(Site(*places)).waves
    assert position.prepare_for(Site(*others)).waves.shape == (11, WIDTH)
    assert position.prepare_for(Site(*places)).waves is first
    assert position.float().prepare_for(Site(*places)).waves.dtype == torch.float32


def test_few_numbers_are_kept_and_none_in_copies(monkeypatch):
    monkeypatch.setattr(transformer_xl, "MOST_KEPT", 3 * 7 * WIDTH)
    position = build("transformer_xl")
    large = Positions(0, 1, 15), Positions(0, 1, 15)
    assert position.prepare_for(Site(*large)).waves is not position.prepare_for(Site(*large)).waves
    for start in range(5):
        position.prepare_for(Site(Positions(start, 1, 4), Positions(0, 1, 4)))
    assert len(position._waves_kept.tensors) == 3
    assert not copy.deepcopy(position)._waves_kept.tensors
    assert not pickle.loads(pickle.dumps(position))._waves_kept.tensors


def test_what_transforms_and_tracing_make_is_not_kept():
    position = build("transformer_xl")
    places = Positions(0, 1, 5), Positions(0, 1, 5)
    torch.func.vmap(lambda x: x * position.prepare_for(Site(*places)).waves.sum())(torch.ones(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        position.prepare_for(Site(*places))
    assert type(position.prepare_for(Site(*places)).waves) is torch.Tensor


def test_what_inference_kept_serves_training_and_follows_the_kernel():
    position = build("transformer_xl")
    places = Positions(0, 1, 5), Positions(0, 1, 5)
    query = key = torch.randn(1, HEADS, 5, WIDTH // HEADS, dtype=torch.float64)

    def table():
        return position.content_terms(query, key, position.share(Site(*places, 1)))[0].table

    with torch.inference_mode():
        before = table()
        assert table() is before
    table().sum().backward()
    assert position.kernel.grad[1].abs().sum() > 0
    with torch.no_grad():
        position.kernel[1] *= 2
        torch.testing.assert_close(table(), 2 * before)
