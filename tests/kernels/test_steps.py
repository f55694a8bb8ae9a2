"""Offset tables with a step equal the same tables with an entry for every offset."""

import pytest
import torch

from tests.kernels.cases import DIM, HEADS, content, random
from whereformer import FactorPair, OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Positions, attention

KINDS = [OffsetBias, OffsetKeys, OffsetQueries, OffsetValues]


def table_of(kind, entries, heads=HEADS):
    return random(HEADS, entries) if kind is OffsetBias else random(heads, entries, DIM)


def expanded(term):
    """The same with step 1; what stands between its entries would show."""
    rows = term.step * (term.table.shape[1] - 1) + 1
    table = term.table.new_full((term.table.shape[0], rows, *term.table.shape[2:]), 1e6)
    table[:, :: term.step] = term.table
    return type(term)(table, term.first)


def attend(terms, queries, keys, inputs, backend="reference"):
    return attention(*inputs, terms, query_positions=queries, key_positions=keys, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 6), (6, 1), (1, 1)])
def test_one_token_has_no_stride(kind, n_q, n_k):
    """Its own says nothing about offsets, and may be anything."""
    inputs, term = content(n_q, n_k), kind(table_of(kind, 9), -12, 3)
    strides = (1 if n_q == 1 else 3), (7 if n_k == 1 else 6)
    queries, keys = Positions(2, strides[0], n_q), Positions(-4, strides[1], n_k)
    torch.testing.assert_close(attend([term], queries, keys, inputs), attend([expanded(term)], queries, keys, inputs))


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_tables_with_and_without_a_step_go_together(backend):
    """As transformer_xl's and a bias of another method do; the pooled queries of a funnel, [CLS] before the first."""
    inputs = content(9, 17)
    queries, keys = Positions(-3, 4, 9), Positions(-1, 2, 17)
    stepped = [kind(table_of(kind, 40), -40, 2) for kind in KINDS]
    plain = [OffsetBias(random(HEADS, 9), -4), OffsetKeys(random(1, 5, DIM), 1), OffsetValues(random(1, 1, DIM), 90)]
    factors = [FactorPair(random(1, HEADS, 9, 3), random(1, HEADS, 17, 3))]
    actual = attend([*stepped, *plain, *factors], queries, keys, inputs, backend)
    expected = attend([*map(expanded, stepped), *plain, *factors], queries, keys, inputs)
    torch.testing.assert_close(actual, expected)


NO_MULTIPLES = "expected first and all offsets between positions to be multiples of"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "step", "queries", "keys", "message"),
    [
        (0, 2, Positions(0, 2, 3), Positions(1, 2, 4), NO_MULTIPLES),
        (0, 2, Positions(0, 2, 3), Positions(0, 3, 4), NO_MULTIPLES),
        (1, 2, Positions(0, 2, 3), Positions(0, 2, 4), NO_MULTIPLES),
        (0, 2, torch.arange(3) * 2, Positions(0, 2, 4), "a step of 2 needs affine positions, got explicit ones"),
        (0, 2, Positions(0, 2, 3), torch.arange(4) * 2, "a step of 2 needs affine positions, got explicit ones"),
    ],
)
def test_misfits_are_named(kind, first, step, queries, keys, message):
    term = kind(table_of(kind, 5), first, step)
    with pytest.raises(ValueError, match=f"^{kind.__name__}.step: {message}"):
        attend([term], queries, keys, content(3, 4))


def test_two_steps_do_not_go_together():
    terms = [OffsetBias(random(HEADS, 5), 0, 2), OffsetBias(random(HEADS, 5), 0, 4)]
    with pytest.raises(ValueError, match=r"OffsetBias.step: expected the same step in all tables, got \[2, 4\]"):
        attend(terms, Positions(0, 4, 3), Positions(0, 4, 4), content(3, 4))
