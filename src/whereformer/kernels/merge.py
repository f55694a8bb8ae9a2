"""Merges a call's terms to at most one of each kind, with tables no longer than the offsets that occur.

The fast backends take merged terms, so that they neither loop over terms nor look at an offset twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import grids
from .call import Call
from .terms import DenseBias, FactorPair, OffsetBias, OffsetBias2d, OffsetKeys, OffsetValues, offset_range
from .tracing import are_numbers


@dataclass(frozen=True)
class Merged:
    """The merged terms: tables and factors in float32 or wider; a single ``dense`` term keeps its dtype.

    ``grid_bias`` is a row of numbers, (heads, length), as in ``grids.CellOffsets``, and ``grids`` are its sizes.
    """

    bias: OffsetBias | None
    key_table: OffsetKeys | None
    value_table: OffsetValues | None
    factors: FactorPair | None
    dense: Tensor | None
    grid_bias: Tensor | None
    grids: list[int]


def merge(call: Call) -> Merged:
    """Merge the terms of a call; differentiable."""
    dtype = torch.promote_types(call.value.dtype, torch.float32)
    span = offset_range(call.query_positions, call.key_positions)
    if span is not None and not are_numbers(*span):
        # A program that is exported for any length keeps its whole tables.
        span = None
    if span is not None:
        low, high = call.offset_limits()
        # Sink tokens are at any offset before the window.
        low = low if call.always_within is None else None
        span = span[0] if low is None else max(span[0], low), span[1] if high is None else min(span[1], high)
    biases = [(term.table, term.first) for term in call.terms if isinstance(term, OffsetBias)]
    keys = [(term.table, term.first) for term in call.terms if isinstance(term, OffsetKeys)]
    values = [(term.table, term.first) for term in call.terms if isinstance(term, OffsetValues)]
    pairs = [term for term in call.terms if isinstance(term, FactorPair)]
    dense = [term.scores for term in call.terms if isinstance(term, DenseBias)]
    grid_bias, sizes = grids.merged([term for term in call.terms if isinstance(term, OffsetBias2d)], dtype)
    return Merged(
        bias=OffsetBias(*_merge_tables(biases, span, dtype)) if biases else None,
        key_table=OffsetKeys(*_merge_tables(keys, span, dtype)) if keys else None,
        value_table=OffsetValues(*_merge_tables(values, span, dtype)) if values else None,
        factors=FactorPair(
            _join([pair.query_factors for pair in pairs], dtype), _join([pair.key_factors for pair in pairs], dtype)
        )
        if pairs
        else None,
        dense=_add_up(dense, dtype),
        grid_bias=grid_bias,
        grids=sizes,
    )


def _add_up(dense: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Sum scores of pairs; a single one is returned unchanged."""
    if len(dense) <= 1:
        return dense[0] if dense else None
    return sum((scores.to(dtype) for scores in dense[1:]), dense[0].to(dtype))


def _merge_tables(
    tables: list[tuple[Tensor, int]], span: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[Tensor, int]:
    """Sum tables on the offsets of ``span`` (None: on all) into one; return it with its first offset."""
    if span is not None:
        tables = [_trim(table, first, *span) for table, first in tables]
    if len(tables) == 1:
        table, first = tables[0]
        return table.to(dtype), first
    first = min(first for _, first in tables)
    last = max(first + table.shape[1] - 1 for table, first in tables)
    offsets = torch.arange(first, last + 1, device=tables[0][0].device)
    parts = [table.to(dtype)[:, (offsets - start).clamp(0, table.shape[1] - 1)] for table, start in tables]
    return sum(parts[1:], parts[0]), first


def _trim(table: Tensor, first: int, low: int, high: int) -> tuple[Tensor, int]:
    """Cut a table to the columns that offsets from ``low`` to ``high`` read, at least one, with their first offset."""
    end = table.shape[1] - 1
    start, stop = (max(0, min(end, offset - first)) for offset in (low, high))
    stop = max(start, stop) + 1
    # A single column has the same value at every offset, so put it near the offsets that occur.
    return table[:, start:stop], low if stop == start + 1 else first + start


def _join(factors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate factors: a sum of products is one product of the joined factors."""
    if len(factors) == 1:
        return factors[0].to(dtype)
    batch = next((part.shape[0] for part in factors if part.shape[0] != 1), 1)
    return torch.cat([part.to(dtype).expand(batch, -1, -1, -1) for part in factors], -1)
