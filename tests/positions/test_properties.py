"""Methods against their formulas, where no golden numbers tell. ``positions.testing`` has the laws of all methods."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.every import EVERY
from tests.positions.layers import scores
from tests.positions.stack import HEADS, WIDTH, build, embeddings, make
from tests.positions.test_contract import assert_close
from whereformer import DenseBias, Positions, Site, attention, build_position
from whereformer.positions.alibi import slopes
from whereformer.positions.t5 import buckets
from whereformer.positions.testing import attend

HEAD_DIM = WIDTH // HEADS

lengths = st.integers(1, 10)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=10 if EVERY else 4)
several = settings(max_examples=30 if EVERY else 10)


# --- buckets

bucket_options = st.booleans().flatmap(
    lambda bidirectional: st.tuples(
        st.integers(2, 40).map(lambda half: 2 * half) if bidirectional else st.integers(2, 80),
        st.integers(1, 300),
        st.just(bidirectional),
    )
)


@several
@given(bucket_options)
def test_buckets_are_in_range_and_monotone_in_distance(options):
    num_buckets, beyond_exact, bidirectional = options
    exact = num_buckets // (4 if bidirectional else 2)
    max_distance = exact + beyond_exact
    table = dict(
        zip(range(-max_distance, max_distance + 1), buckets(num_buckets, max_distance, bidirectional), strict=True)
    )
    assert set(table.values()) <= set(range(num_buckets))
    left = [table[-distance] for distance in range(max_distance + 1)]
    right = [table[distance] for distance in range(1, max_distance + 1)]
    assert left == sorted(left)
    assert right == sorted(right)
    assert left[:exact] == list(range(exact))
    if bidirectional:
        assert max(left) == num_buckets // 2 - 1
        assert right == [bucket + num_buckets // 2 for bucket in left[1:]]
    else:
        assert max(left) == num_buckets - 1
        assert set(right) == {0}


# --- TISA


@few
@given(length=lengths, seed=seeds)
def test_tisa_without_kernels_is_no_position_at_all(length, seed):
    torch.manual_seed(seed)
    words = embeddings(length)
    assert_close(attend(make("tisa without kernels"), words), attend(build("none"), words))


# --- FIRE


@several
@given(length=st.integers(1, 24), threshold=st.floats(0.5, 40), layer=st.integers(0, 3), seed=seeds)
def test_fire_equals_the_paper(length, threshold, layer, seed):
    """Li et al. (2023): b(i, j) = f(log(|c (i - j)| + 1) / (log(|c max(i, L)| + 1) + 1e-6)) for j up to i."""
    torch.manual_seed(seed)
    position = build("fire", causal=True, initial_threshold=threshold, width=5)
    network = nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, HEADS)).double()
    network.load_state_dict(
        {
            "0.weight": position.hidden_weight[layer].unsqueeze(-1),
            "0.bias": position.hidden_bias[layer],
            "2.weight": position.out_weight[layer],
            "2.bias": position.out_bias[layer],
        }
    )
    c, trained_threshold = position.scale[layer].item(), abs(position.threshold[layer].item() * threshold)
    [term] = position.terms(embeddings(length), Site.self_attention(Positions(0, 1, length), layer=layer))
    for i in range(length):
        for j in range(i + 1):
            distance = math.log(abs(c * (i - j)) + 1)
            furthest = math.log(abs(c * max(i, trained_threshold)) + 1) + 1e-6
            expected = network(torch.tensor([distance / furthest], dtype=torch.float64))
            assert_close(term.scores[0, :, i, j], expected)


# --- ALiBi


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (16, [2 ** (-head / 2) for head in range(1, 17)]),
        (12, [2**-head for head in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (3, [2**-4, 2**-8, 2**-2]),
    ],
)
def test_alibi_has_the_slopes_of_the_paper(heads, expected):
    assert slopes(heads) == pytest.approx(expected, rel=1e-12)


@few
@given(n_q=lengths, n_k=lengths)
def test_causal_alibi_is_the_authors_bias(n_q, n_k):
    """Theirs adds slope * key position to the scores of a causal model: the same up to a number per row."""
    position = build_position("alibi", hidden_size=24, num_heads=12, causal=True)
    value = torch.randn(1, 12, n_k, 2, dtype=torch.float64)
    positions = Positions(n_k - n_q, 1, n_q), Positions(0, 1, n_k)
    terms = position.terms(torch.zeros(1, n_q, 24), Site(*positions))
    where = dict(zip(("query_positions", "key_positions"), positions, strict=True))
    theirs = torch.tensor(slopes(12)).view(1, 12, 1, 1) * torch.arange(n_k)
    call = partial(attention, None, None, value, causal=True, **where)
    assert_close(call(terms), call([DenseBias(theirs.expand(1, 12, n_q, n_k))]), 1e-6)


# --- Synthesizer


VARIANTS = ("random", "factorized_random", "dense", "factorized_dense")


@pytest.mark.parametrize("content", ["none", "add", "mix"])
@pytest.mark.parametrize("mixture", ["softmax", "sum"])
@pytest.mark.parametrize("variants", [("random", "dense"), ("dense", "factorized_dense"), VARIANTS], ids="+".join)
def test_a_mixture_of_synthesizers_is_the_weighted_sum_of_its_parts(variants, mixture, content):
    position = build("synthesizer", variant="+".join(variants), mixture=mixture, content=content)
    positions, hidden = Positions(0, 1, 7), embeddings(7)
    query, key, value = torch.randn(3, 2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    parts = []
    for variant in variants:
        part = build("synthesizer", variant=variant)
        state = position.state_dict()
        part.load_state_dict({name: state[name] for name in part.state_dict()})
        parts.append(scores(part.terms(hidden, Site(positions, positions, 1)), 7, 7))
    alpha = position.alpha
    if mixture == "softmax":
        shares = torch.cat((torch.zeros(int(content == "mix"), dtype=torch.float64), alpha[1])).softmax(-1)
        of_content, shares = (shares[0], shares[1:]) if content == "mix" else (1.0, shares)
    else:
        share = torch.sigmoid(alpha[1]) if content == "mix" else 1.0
        of_content, shares = (1 - share if content == "mix" else 1.0), [share] * len(variants)
    expected = sum(share * part for share, part in zip(shares, parts, strict=True))
    assert_close(scores(position.terms(hidden, Site(positions, positions, 1)), 7, 7), expected)
    assert_close(position.transform_qkv(query, key, value, Site(positions, positions, 1))[0], query * of_content)


def test_a_mixture_starts_with_equal_shares():
    for content, count in (("none", 2), ("add", 2), ("mix", 3)):
        position = build_position(
            "synthesizer", hidden_size=8, num_heads=2, max_length=6, variant="random+dense", content=content
        )
        assert_close(torch.stack(list(position._mixture_weights(0))), torch.full((count,), 1 / count))
