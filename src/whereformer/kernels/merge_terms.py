"""Merges a call's terms to at most one of each kind, with tables no longer than the offsets that occur.

Backends get merged terms, so that they neither loop over terms nor look at an offset twice. The merged terms have the
same sum as the terms: tables that are read at the same offset and meet the same rows are added, and where the rows
differ, ``<a, s> + <b, t> = <[a, b], [s, t]>`` makes one product of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .terms import DenseBias, DistanceDecay, FactorPair, OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Term
from .tracing import is_known_true


def merge_terms(
    terms: Sequence[Term],
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    scale: float,
    span: tuple[int, int] | None,
) -> dict[str, Any]:
    """Merge the terms of a call of this query, key and value; differentiable.

    The ``span`` is the smallest and the largest offset that is allowed. If None, it depends on values in tensors.

    Returns:
        The fields of :class:`~whereformer.kernels.call.Call` that terms decide, by name: sums, factors and levels in
        float32 or wider, except factors that were all passed in the value's dtype, which keep it. A single table in
        half precision and a single dense term keep their dtype. Where some of several :class:`OffsetKeys` have
        factors, the merged one has factors; likewise :class:`OffsetQueries`.
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
    # Scores that have all heads stay the same tensors.
    dense = [scores if scores.shape[1] == heads else scores.expand(-1, heads, -1, -1) for scores in dense]
    if len(dense) > 1:
        dense = [sum((scores.to(dtype) for scores in dense[1:]), dense[0].to(dtype))]
    pair_dtypes = {factors.dtype for pair in pairs for factors in (pair.query_factors, pair.key_factors)}
    pair_dtype = value.dtype if pair_dtypes == {value.dtype} else dtype
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
        "query_factors": _concat_factors([pair.query_factors for pair in pairs], pair_dtype),
        "key_factors": _concat_factors([pair.key_factors for pair in pairs], pair_dtype),
        "query_levels": _concat_factors([term.query_levels.unsqueeze(-1) for term in decays], dtype),
        "key_levels": _concat_factors([term.key_levels.unsqueeze(-1) for term in decays], dtype),
        "dense": dense[0] if dense else None,
    }


def _merge_tables(
    tables: list[tuple[Tensor, int]], span: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[Tensor | None, int]:
    """Sum tables on the offsets of ``span`` (None: all); return the sum (None without tables) and its first offset."""
    if not tables:
        return None, 0
    aligned, first = _align_tables(tables, span, dtype)
    return sum(aligned[1:], aligned[0]), first


def _merge_vectors(
    terms: list[tuple[Tensor, int, Tensor | None]],
    rows: Tensor | None,
    heads: int,
    scale: float,
    span: tuple[int, int] | None,
    dtype: torch.dtype,
) -> tuple[Tensor | None, int, Tensor | None]:
    """Merge terms (table of vectors, its first offset, factors) into one table, its first offset and its factors.

    Tables without factors are multiplied with ``rows``, the queries or keys, times ``scale``.
    """
    plain = [(table, first) for table, first, factors in terms if factors is None]
    if len(plain) == len(terms):
        return *_merge_tables(plain, span, dtype), None
    tables = [(table, first) for table, first, factors in terms if factors is not None]
    factors = [factors for *_, factors in terms if factors is not None]
    if plain:
        assert rows is not None
        aligned, first = _align_tables(plain, span, dtype)
        tables.append((sum(aligned[1:], aligned[0]), first))
        # Factors have a row for every query head, also where query heads share keys.
        factors.append((rows.to(dtype) * scale).repeat_interleave(heads // rows.shape[1], 1))
    aligned, first = _align_tables(tables, span, dtype)
    merged = aligned[0]
    if len(aligned) > 1:
        # A sum of products is one product of longer vectors.
        table_heads = max(len(table) for table in aligned)
        merged = torch.cat([table.expand(table_heads, -1, -1) for table in aligned], -1)
    return merged, first, _concat_factors(factors, dtype)


def _align_tables(
    tables: list[tuple[Tensor, int]], span: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[list[Tensor], int]:
    """Bring tables to the same offsets, those in ``span`` (None: all) that any table has; return them, and the first
    offset."""
    if span is not None:
        tables = [_trim(table, first, *span) for table, first in tables]
    if len(tables) == 1:
        table, first = tables[0]
        return [table if table.dtype.itemsize == 2 else table.to(dtype)], first
    first = min(first for _, first in tables)
    last = max(first + table.shape[1] - 1 for table, first in tables)
    aligned = []
    for table, start in tables:
        columns = table.to(dtype)
        if not is_known_true(start == first) or not is_known_true(table.shape[1] == last + 1 - first):
            indices = (torch.arange(first, last + 1, device=table.device) - start).clamp(0, table.shape[1] - 1)
            # The gradient of an index would take many times as long.
            columns = columns.index_select(1, indices)
        aligned.append(columns)
    return aligned, first


def _trim(table: Tensor, first: int, low: int, high: int) -> tuple[Tensor, int]:
    """Cut a table to the columns that offsets from ``low`` to ``high`` read, at least one, with their first offset."""
    end = table.shape[1] - 1
    start, stop = (max(0, min(end, offset - first)) for offset in (low, high))
    stop = max(start, stop) + 1
    # A view of the whole table would be an operation too.
    columns = table if stop - start == table.shape[1] else table.narrow(1, start, stop - start)
    # A single column is read at every offset, so it may begin at ``low``, which keeps aligned tables short.
    return columns, low if stop == start + 1 else first + start


def _concat_factors(factors: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Concatenate factors, or levels of one number: a sum of products is one product of the joined factors."""
    if len(factors) <= 1:
        return factors[0].to(dtype) if factors else None
    batch = next((part.shape[0] for part in factors if part.shape[0] != 1), 1)
    return torch.cat([part.to(dtype).expand(batch, -1, -1, -1) for part in factors], -1)
