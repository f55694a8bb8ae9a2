"""Merges a call's terms to at most one of each kind, with tables no longer than the offsets that occur.

The fast backends take merged terms, so that they neither loop over terms nor look at an offset twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .terms import DenseBias, DistanceDecay, FactorPair, OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Term
from .tracing import holds


def merge(
    terms: Sequence[Term],
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    scale: float,
    span: tuple[int, int] | None,
) -> dict[str, Any]:
    """Merge the terms of a call of this query, key and value; differentiable.

    Args:
        span: the smallest and the largest offset that is allowed; None if only the data can tell.

    Returns:
        The fields of :class:`~whereformer.kernels.call.Call` that terms decide, by name: tables, factors and levels
        in float32 or wider, but factors that all came in the value's dtype stay in it. A single dense term keeps its
        dtype. Where some of several :class:`OffsetKeys` have factors, all have; likewise :class:`OffsetQueries`.
    """
    dtype = value.dtype if value.dtype.itemsize >= 4 else torch.float32
    heads = (value if query is None else query).shape[1]
    biases = [(term.table, term.first) for term in terms if isinstance(term, OffsetBias)]
    keys = [(term.table, term.first, term.query_factors) for term in terms if isinstance(term, OffsetKeys)]
    queries = [(term.table, term.first, term.key_factors) for term in terms if isinstance(term, OffsetQueries)]
    values = [(term.table, term.first) for term in terms if isinstance(term, OffsetValues)]
    pairs = [term for term in terms if isinstance(term, FactorPair)]
    decays = [term for term in terms if isinstance(term, DistanceDecay)]
    dense = [term.scores for term in terms if isinstance(term, DenseBias)]
    # Those that have all heads stay the same tensors.
    dense = [each if each.shape[1] == heads else each.expand(-1, heads, -1, -1) for each in dense]
    if len(dense) > 1:
        dense = [sum((part.to(dtype) for part in dense[1:]), dense[0].to(dtype))]
    came = {factors.dtype for pair in pairs for factors in (pair.query_factors, pair.key_factors)}
    of_pairs = value.dtype if came == {value.dtype} else dtype
    key_table, first_key, key_table_factors = _merge_vectors(keys, query, heads, scale, span, dtype)
    query_table, first_query, query_table_factors = _merge_vectors(queries, key, heads, scale, span, dtype)
    bias, first_bias = _merge_tables(biases, span, dtype)
    value_table, first_value = _merge_tables(values, span, dtype)
    return {
        "bias": bias,
        "key_table": key_table,
        "query_table": query_table,
        "value_table": value_table,
        "first": [first_bias, first_key, first_query, first_value],
        "key_table_factors": key_table_factors,
        "query_table_factors": query_table_factors,
        "query_factors": _join([pair.query_factors for pair in pairs], of_pairs),
        "key_factors": _join([pair.key_factors for pair in pairs], of_pairs),
        "query_levels": _join([term.query_levels.unsqueeze(-1) for term in decays], dtype),
        "key_levels": _join([term.key_levels.unsqueeze(-1) for term in decays], dtype),
        "dense": dense[0] if dense else None,
    }


def _merge_tables(
    tables: list[tuple[Tensor, int]], span: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[Tensor | None, int]:
    """Sum tables on the offsets of ``span`` (None: on all) into one, None without any; return it with its first
    offset."""
    if not tables:
        return None, 0
    parts, first = _on_same_offsets(tables, span, dtype)
    return sum(parts[1:], parts[0]), first


def _merge_vectors(
    given: list[tuple[Tensor, int, Tensor | None]],
    rows: Tensor | None,
    heads: int,
    scale: float,
    span: tuple[int, int] | None,
    dtype: torch.dtype,
) -> tuple[Tensor | None, int, Tensor | None]:
    """Merge tables of vectors, each with its first offset and its factors, into one; return the same of it.

    Those without factors meet ``rows``, the queries or keys, times ``scale``.
    """
    plain = [(table, first) for table, first, factors in given if factors is None]
    if len(plain) == len(given):
        return *_merge_tables(plain, span, dtype), None
    tables = [(table, first) for table, first, factors in given if factors is not None]
    factors = [factors for *_, factors in given if factors is not None]
    if plain:
        assert rows is not None
        parts, first = _on_same_offsets(plain, span, dtype)
        tables.append((sum(parts[1:], parts[0]), first))
        # Query heads that share keys have factors of their own.
        factors.append((rows.to(dtype) * scale).repeat_interleave(heads // rows.shape[1], 1))
    parts, first = _on_same_offsets(tables, span, dtype)
    most = max(len(part) for part in parts)
    # A sum of products is one product of longer vectors.
    table = parts[0] if len(parts) == 1 else torch.cat([part.expand(most, -1, -1) for part in parts], -1)
    return table, first, _join(factors, dtype)


def _on_same_offsets(
    tables: list[tuple[Tensor, int]], span: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[list[Tensor], int]:
    """Give tables the same offsets, those of ``span`` that any has (None: all); return them with the first offset."""
    if span is not None:
        tables = [_trim(table, first, *span) for table, first in tables]
    if len(tables) == 1:
        table, first = tables[0]
        return [table.to(dtype)], first
    first = min(first for _, first in tables)
    last = max(first + table.shape[1] - 1 for table, first in tables)
    parts = []
    for table, start in tables:
        part = table.to(dtype)
        if not holds(start == first) or not holds(table.shape[1] == last + 1 - first):
            columns = (torch.arange(first, last + 1, device=table.device) - start).clamp(0, table.shape[1] - 1)
            # Not an index, whose gradient takes many times as long.
            part = part.index_select(1, columns)
        parts.append(part)
    return parts, first


def _trim(table: Tensor, first: int, low: int, high: int) -> tuple[Tensor, int]:
    """Cut a table to the columns that offsets from ``low`` to ``high`` read, at least one, with their first offset."""
    end = table.shape[1] - 1
    start, stop = (max(0, min(end, offset - first)) for offset in (low, high))
    stop = max(start, stop) + 1
    # A single column has the same value at every offset, so put it near the offsets that occur.
    # A part that is all would be an operation too.
    part = table if stop - start == table.shape[1] else table.narrow(1, start, stop - start)
    return part, low if stop == start + 1 else first + start


def _join(factors: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Concatenate factors, or levels of one number: a sum of products is one product of the joined factors."""
    if len(factors) <= 1:
        return factors[0].to(dtype) if factors else None
    batch = next((part.shape[0] for part in factors if part.shape[0] != 1), 1)
    return torch.cat([part.to(dtype).expand(batch, -1, -1, -1) for part in factors], -1)
