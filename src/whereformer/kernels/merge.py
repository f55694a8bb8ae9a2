"""A call's terms with at most one of each kind, and tables no longer than the offsets that occur.

The fast backends take this, so that none has to loop over terms or look at an offset twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .call import Call
from .terms import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetValues, offset_range
from .tracing import are_numbers


@dataclass(frozen=True)
class Merged:
    """The terms of a call; tables and factors in at least float32, ``dense`` as it came where it came alone."""

    bias: OffsetBias | None
    key_table: OffsetKeys | None
    value_table: OffsetValues | None
    factors: FactorPair | None
    dense: Tensor | None


def merge(call: Call) -> Merged:
    """The same call with the fewest terms; differentiable."""
    dtype = torch.promote_types(call.value.dtype, torch.float32)
    span = offset_range(call.query_positions, call.key_positions)
    if span is not None and not are_numbers(*span):
        # An exported program for any length keeps its tables whole.
        span = None
    if span is not None and call.causal:
        span = span[0], min(span[1], 0)
    biases = [(term.table, term.first) for term in call.terms if isinstance(term, OffsetBias)]
    keys = [(term.table, term.first) for term in call.terms if isinstance(term, OffsetKeys)]
    values = [(term.table, term.first) for term in call.terms if isinstance(term, OffsetValues)]
    pairs = [term for term in call.terms if isinstance(term, FactorPair)]
    dense = [term.scores for term in call.terms if isinstance(term, DenseBias)]
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
    )


def _add_up(dense: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Scores of pairs, summed; a single one as it came."""
    if len(dense) <= 1:
        return dense[0] if dense else None
    return sum((scores.to(dtype) for scores in dense[1:]), dense[0].to(dtype))


def _merge_tables(
    tables: list[tuple[Tensor, int]], span: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[Tensor, int]:
    """One table, and its first offset, that says what all of them say on the offsets of ``span`` (None: on all)."""
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
    """The columns that offsets from ``low`` to ``high`` read; at least one."""
    end = table.shape[1] - 1
    start, stop = (max(0, min(end, offset - first)) for offset in (low, high))
    stop = max(start, stop) + 1
    # A single column is the same wherever it stands, so it may as well stand near.
    return table[:, start:stop], low if stop == start + 1 else first + start


def _join(factors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Factors side by side: a sum of products is one product."""
    if len(factors) == 1:
        return factors[0].to(dtype)
    batch = next((part.shape[0] for part in factors if part.shape[0] != 1), 1)
    return torch.cat([part.to(dtype).expand(batch, -1, -1, -1) for part in factors], -1)
