"""The arguments of the Triton kernels: tensors with their strides, and numbers, in named tuples.

A field that is None or a compile-time constant (``tl.constexpr``) is compiled into the kernel. Each tuple holds either
tuples or values, never both: Triton 3.6 loses the constants of an inner tuple if plain values stand next to it.

Scores are in units of log2 in all kernels. They multiply the table of numbers by log2(e) when they load it; the
products with tables of vectors are multiplied before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..call import TABLES, Call
from ..terms import allowed_span
from .blocks import MAX_BLOCK, cdiv, choose_precision, pad_width

if TYPE_CHECKING:
    import triton.language as tl


class RowMatrix(NamedTuple):
    """A (batch, heads, n, width) tensor with a contiguous last axis; keys and values may have fewer heads.

    ``data`` is None if a call does not have the tensor.
    """

    data: Tensor | None
    batch_stride: int | None
    head_stride: int | None
    row_stride: int | None
    width: tl.constexpr
    padded_width: tl.constexpr  # the width of its tiles, a power of two
    group_size: tl.constexpr  # the number of neighboring query heads that share a head


class PairMatrix(NamedTuple):
    """A (batch, heads, n_q, n_k) tensor; ``data`` is None if a call does not have the tensor."""

    data: Tensor | None
    batch_stride: int | None
    head_stride: int | None
    row_stride: int | None
    column_stride: int | None


class Inputs(NamedTuple):
    """The tensors that are multiplied; ``query`` and ``key``, or both factors, may have no data."""

    query: RowMatrix
    key: RowMatrix
    value: RowMatrix
    query_factors: RowMatrix
    key_factors: RowMatrix
    d_out: RowMatrix  # the output's gradient; without data in the forward


class BiasTable(NamedTuple):
    """A table of numbers over offsets. Triton compiles for numbers that 16 divides."""

    data: Tensor | None  # (heads, length), in natural units; None if a call does not have the table
    offset_stop: int | None  # after the last column: divisible by 16 if lengths are, in a table of every offset
    length: int | None


class VectorTable(NamedTuple):
    """A table of vectors over offsets, as its products with the rows that read it: (batch, heads, n_q, length).

    The rows that read a table of queries belong to keys: (batch, heads, n_k, length).
    """

    products: Tensor | None  # None in kernels that do not read them
    first: int | tl.constexpr | None  # the offset of the first column; None if a call does not have the table
    length: int | tl.constexpr | None
    padded_length: tl.constexpr | None  # a power of two of at least the length; None if the table is long


class Products(NamedTuple):
    """How queries and keys are multiplied, and how their products are bounded."""

    scale: float  # the factor on products, which is positive
    log2_scale: float  # scale * log2(e), or scale / cap
    cap: float | None  # in units of log2; None without a soft cap
    is_scaled_last: tl.constexpr  # whether nothing is added to the products, so that they are scaled last
    precision: tl.constexpr  # Triton's name of how products of float32 are computed


class TableSpan(NamedTuple):
    """The offsets beyond which all tables are constant; None if no pair reads beyond the ends of any table."""

    first: int | None
    last: int | None


class Terms(NamedTuple):
    """What turns inputs into scores, which are in units of log2."""

    products: Products
    span: TableSpan
    bias: BiasTable
    key_table: VectorTable  # products of the queries with it, times scale * log2(e)
    query_table: VectorTable  # products of the keys' factors with it, times log2(e)
    value_table: VectorTable  # products of the output's gradient with it
    query_levels: RowMatrix  # the levels whose distances are subtracted, in natural units; may have no data
    key_levels: RowMatrix
    dense: PairMatrix  # in natural units


class PairRules(NamedTuple):
    """Which queries attend to which keys, at which offset, and which weights dropout removes."""

    n_q: int
    n_k: int
    heads: int
    min_offset: int | None  # the offsets that are allowed; None without a limit
    max_offset: int | None
    start: int  # the offset between the first query and the first key; 0 if positions are explicit
    query_stride: tl.constexpr
    key_stride: tl.constexpr
    query_positions: Tensor | None  # None if positions are affine
    query_positions_stride: int | None  # from item to item of the batch
    key_positions: Tensor | None
    key_positions_stride: int | None
    key_ranks: Tensor | None  # the number of earlier keys of the same block at the same position
    query_ranks: Tensor | None  # likewise; None without a table of queries
    key_mask: Tensor | None
    key_end: Tensor | None  # for each row of the batch, the index after the last key that may be attended
    query_documents: Tensor | None
    key_documents: Tensor | None
    first_keys: Tensor | None  # (batch, n_q): the first and the last key of each query's document
    last_keys: Tensor | None
    first_queries: Tensor | None  # likewise, (batch, n_k)
    last_queries: Tensor | None
    dropout_seeds: Tensor | None  # 32 bits for each row of scores
    dropout_threshold: int
    dropout_scale: float


class Norm(NamedTuple):
    """What turns a row's scores into weights, ``exp2(scores - shift - log_sum)``; tensors of (batch, heads, n_q).

    If ``log_sum`` is None, ``shift`` holds the sum of both, which saves a number in memory and registers. They are
    separate if terms may add large numbers: ``log_sum`` would be rounded away in a sum with these.
    """

    shift: Tensor  # inf in rows that may not attend to anything
    log_sum: Tensor | None
    head_stride: int  # of all three
    delta: Tensor | None  # what softmax's gradient subtracts in each row; None in the forward


class TableSums(NamedTuple):
    """Sums over the keys of each query that read a column of a table; None if not needed.

    For a table of queries, they are sums over the queries of each key. ``ends``, (batch, heads, 2, n), are the sums at
    or beyond the ends of the table. ``rows`` are the sums of each column between them, in pieces, so that the sums of a
    tile are neighbors in memory: (batch, heads, pieces, rows, SUMS_WIDTH).
    """

    ends: Tensor | None
    rows: Tensor | None

    def by_column(self, length: int) -> Tensor:
        """Return the sums of each column, (batch, heads, n, length)."""
        assert self.ends is not None
        assert self.rows is not None
        if length == 1:
            return self.ends.sum(2).unsqueeze(-1)
        between = self.rows.transpose(2, 3).flatten(3)[:, :, : self.ends.shape[3], : length - 2]
        return torch.cat([self.ends[:, :, 0].unsqueeze(-1), between, self.ends[:, :, 1].unsqueeze(-1)], -1)


NO_SUMS = TableSums(None, None)


class QueryGradients(NamedTuple):
    """The tensors that receive sums over keys."""

    query: RowMatrix
    factors: RowMatrix
    levels: RowMatrix
    key_table: TableSums
    value_table: TableSums  # of weights
    bias: TableSums  # without rows: diagonals have them


class KeyGradients(NamedTuple):
    """The tensors that receive sums over queries."""

    key: RowMatrix
    value: RowMatrix
    factors: RowMatrix
    levels: RowMatrix
    query_table: TableSums


LOG2E = math.log2(math.e)

PREPARED_ROWS = 64
"""The queries that a program of ``prepare`` works on."""

SUMS_WIDTH, SUMS_ROWS = 32, MAX_BLOCK
"""The columns of a table in a piece of its sums; and a number that divides the number of rows in each piece."""

BIAS_COLUMNS = 128
"""The columns of a bias's gradient that a program of ``finish_bias`` adds up."""

MAX_PRODUCTS_PER_QUERY = 256
"""The most products with a table of vectors in memory per query, on average. With a longer table, the queries are split
into parts of ``n_q * MAX_PRODUCTS_PER_QUERY`` numbers, so that memory grows only with n."""

MIN_PART_ROWS = 128
"""The fewest queries in such a part, whatever the length of the table."""

MAX_COMPILED_LENGTH = 128
"""Tables of at most this number of vectors are loaded as a whole, and their offsets are compiled into the kernels."""


@lru_cache(None, typed=True)
def constant(value: int | bool | str) -> tl.constexpr:
    """Wrap a value as a compile-time constant of the kernels.

    The same value is the same object: Triton looks up a compiled kernel by its constants, and would compare two objects
    in Python.
    """
    # Imported here, because not every build of torch comes with Triton.
    from triton.language import constexpr

    return constexpr(value)


def row_matrix(tensor: Tensor | None, group_size: int = 1) -> RowMatrix:
    """Describe a tensor to the kernels; each of its heads serves ``group_size`` query heads."""
    if tensor is None:
        return RowMatrix(None, None, None, None, constant(16), constant(16), constant(1))
    width = tensor.shape[3]
    if tensor.stride(3) != 1 and width != 1:
        tensor = tensor.contiguous()
    _, head, row, _ = tensor.stride()
    widths = constant(width), constant(pad_width(width))
    return RowMatrix(tensor, _item_stride(tensor), head, row, *widths, constant(group_size))


def _item_stride(tensor: Tensor) -> int:
    """Return the stride from item to item of the batch: 0 if all items read the same row."""
    return tensor.stride(0) if len(tensor) > 1 else 0


def level_matrix(tensor: Tensor | None) -> RowMatrix:
    """Describe levels, or their gradient, to the kernels: no product of matrices needs their tiles to be wide."""
    matrix = row_matrix(tensor)
    return matrix if tensor is None else matrix._replace(padded_width=constant(1 << (tensor.shape[3] - 1).bit_length()))


def pair_matrix(tensor: Tensor | None) -> PairMatrix:
    """Describe a tensor with one number per pair to the kernels."""
    return PairMatrix(*[None] * 5) if tensor is None else PairMatrix(tensor, _item_stride(tensor), *tensor.stride()[1:])


def build_inputs(call: Call, d_out: Tensor | None = None) -> Inputs:
    """Return the tensors that the call multiplies."""
    key, value = row_matrix(call.key, call.group_size), row_matrix(call.value, call.group_size)
    return Inputs(row_matrix(call.query), key, value, *map(row_matrix, (call.query_factors, call.key_factors, d_out)))


def build_norm(row_stats: Tensor, delta: Tensor | None = None) -> Norm:
    """Describe the saved numbers of each row to the kernels, (1 or 2, batch, heads, n_q)."""
    shift, *log_sum = row_stats.unbind()
    return Norm(shift, log_sum[0] if log_sum else None, shift.stride(1), delta)


def allocate_table_sums(call: Call, name: str) -> TableSums:
    """Allocate the sums of a table. A kernel has to fill the rows with zeros first; a bias does not have rows."""
    n, length = call.n_k if name == "query_table" else call.n_q, getattr(call, name).shape[1]
    pieces, rows = cdiv(max(length - 2, 0), SUMS_WIDTH), cdiv(n, SUMS_ROWS) * SUMS_ROWS
    value, size = call.value, (call.value.shape[0], call.heads)
    ends = value.new_empty(*size, 2, n, dtype=torch.float32)
    if name == "bias":
        return TableSums(ends, None)
    return TableSums(ends, value.new_empty(*size, pieces, rows, SUMS_WIDTH, dtype=torch.float32))


def build_pair_rules(call: Call) -> PairRules:
    """Describe to the kernels which queries attend to which keys.

    This allocates ``key_end``, and the dropout seeds of rows where the call has one seed, for ``prepare``.
    """
    value, key_end, seeds = call.value, None, call.seed
    if call.key_mask is not None:
        key_end = value.new_empty(value.shape[0], dtype=torch.int32)
    if seeds is not None and seeds.dim() == 0:
        seeds = value.new_empty(value.shape[0], call.heads, call.n_q, dtype=torch.int32)
    key_ranks = query_ranks = query_documents = key_documents = None
    partners: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = None, None, None, None
    query_positions, key_positions = call.query_positions, call.key_positions
    if call.query_documents is not None and call.key_documents is not None:
        query_documents, key_documents = _to_common_dtype(call.query_documents, call.key_documents)
        partners = *_find_partners(query_documents, key_documents), *_find_partners(key_documents, query_documents)
    strides: list[int | None] = [None, None]
    if query_positions is not None and key_positions is not None:
        query_positions, key_positions = _to_common_dtype(query_positions, key_positions)
        strides = [_item_stride(rows) if rows.dim() == 2 else 0 for rows in (query_positions, key_positions)]
        key_ranks = _count_earlier(key_positions)
        query_ranks = None if call.query_table is None else _count_earlier(query_positions)
    query_start, query_stride, key_start, key_stride = call.affine
    offsets = call.min_offset, call.max_offset, key_start - query_start, constant(query_stride), constant(key_stride)
    positions = query_positions, strides[0], key_positions, strides[1], key_ranks, query_ranks
    mask = None if call.key_mask is None else call.key_mask.contiguous().view(torch.uint8), key_end
    documents = query_documents, key_documents, *partners
    dropout = seeds, int(call.dropout_p * 2**32), 1.0 / (1.0 - call.dropout_p)
    return PairRules._make((call.n_q, call.n_k, call.heads, *offsets, *positions, *mask, *documents, *dropout))


def table_matrix(table: Tensor | None, call: Call) -> RowMatrix:
    """Describe a table of vectors, (heads or 1, T, dim), to the kernels, for every item and head."""
    return row_matrix(None if table is None else table.unsqueeze(0).expand(call.value.shape[0], call.heads, -1, -1))


def _to_common_dtype(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Convert two tensors of ids or positions to one type that kernels can load and compare."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    elif not dtype.is_floating_point:
        dtype = torch.int64
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


def _find_partners(documents: Tensor, partners: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last of the ``partners`` in the same document, int32 in the shape of ``documents``.

    Without any, the first is after the end and the last is -1.
    """
    ordered, indices = partners.sort(stable=True)
    bounds = [torch.searchsorted(ordered, documents, right=right) for right in (False, True)]
    is_missing, last = bounds[0] == bounds[1], partners.shape[1] - 1
    first = indices.gather(1, bounds[0].clamp_max(last)).masked_fill(is_missing, last + 1)
    return first.int(), indices.gather(1, (bounds[1] - 1).clamp_min(0)).masked_fill(is_missing, -1).int()


def _count_earlier(positions: Tensor) -> Tensor:
    """Count the earlier tokens at the same position in each token's block; int32, in the shape of ``positions``."""
    length = positions.shape[-1]
    short = functional.pad(positions, (0, -length % MAX_BLOCK)).unflatten(-1, (-1, MAX_BLOCK))
    same = short.unsqueeze(-1) == short.unsqueeze(-2)
    return same.tril(-1).sum(-1, dtype=torch.int32).flatten(-2)[..., :length].contiguous()


def build_terms(call: Call, products: dict[str, Tensor | None]) -> Terms:
    """Describe the terms of scores to the kernels, with the products of each ``VectorTable`` by the table's name."""
    spans = [(first, table.shape[1]) for first, table in zip(call.first, call.tables, strict=True) if table is not None]
    first = last = None
    # If some pairs read beyond the ends of one table, the span includes all tables, which are constant beyond it.
    if not all(covers_all_offsets(call, *span) for span in spans):
        first, last = min(first for first, _ in spans), max(first + length - 1 for first, length in spans)
    bias = BiasTable(None, None, None)
    if call.bias is not None:
        length = call.bias.shape[1]
        bias = BiasTable(call.bias.contiguous(), call.first[0] + length, length)
    log2_scale, cap = call.scale * LOG2E, None
    if call.softcap is not None:
        log2_scale, cap = call.scale / call.softcap, call.softcap * LOG2E
    terms = call.bias, call.key_table, call.query_table, call.query_factors, call.query_levels, call.dense, cap
    is_scaled_last, precision = all(term is None for term in terms), choose_precision(call)
    tables = [_vector_table(call, name, products) for name in ("key_table", "query_table", "value_table")]
    key_table, query_table, value_table = tables
    return Terms(
        Products(call.scale, log2_scale, cap, constant(is_scaled_last), constant(precision)),
        TableSpan(first, last),
        bias,
        key_table,
        query_table,
        value_table,
        level_matrix(call.query_levels),
        level_matrix(call.key_levels),
        pair_matrix(call.dense),
    )


def has_diagonals(call: Call) -> bool:
    """Whether all pairs on a diagonal of scores have one offset: positions are affine, with one stride."""
    return call.query_positions is None and call.affine[1] == call.affine[3]


def covers_all_offsets(call: Call, first: int, length: int) -> bool:
    """Whether no pair of the call reads beyond the ends of a table; False for explicit positions."""
    span = allowed_span(*call.positions(), call.min_offset, call.max_offset)
    return span is not None and first <= span[0] and span[1] < first + length


def _vector_table(call: Call, name: str, products_by_name: dict[str, Tensor | None]) -> VectorTable:
    table, first, products = getattr(call, name), call.first[TABLES.index(name)], products_by_name.get(name)
    if table is None:
        return VectorTable(None, None, None, None)
    length = table.shape[1]
    if length > MAX_COMPILED_LENGTH:
        return VectorTable(products, first, length, None)
    if covers_all_offsets(call, first, length):
        # Such a table often ends where the sequence's offsets do: constants would need a kernel for every length.
        return VectorTable(products, first, length, constant(pad_width(length)))
    return VectorTable(products, constant(first), constant(length), constant(pad_width(length)))


def split_queries(call: Call, size: int | None = None) -> Iterator[tuple[Call, range]]:
    """Split a call into runs of ``size`` queries, each with the range of its rows.

    By default, the products of a run with tables of vectors take little memory; mostly one run has all queries. If
    there are several runs, each has the seeds of its rows as its seed, in the 32 bits that the kernels take.
    """
    n_q = call.n_q
    if size is None:
        longest = max([1, *(table.shape[1] for table in (call.key_table, call.value_table) if table is not None)])
        size = n_q if longest <= MAX_PRODUCTS_PER_QUERY else max(MIN_PART_ROWS, n_q * MAX_PRODUCTS_PER_QUERY // longest)
    if size >= n_q:
        yield call, range(n_q)
        return
    seeds = call.seed if call.seed is None or call.seed.dim() else call.dropout_seeds()
    for first in range(0, n_q, size):
        rows = range(first, min(first + size, n_q))
        part = call.select(rows)
        if seeds is not None:
            part = replace(part, seed=seeds[:, :, first : rows.stop].to(torch.int32).contiguous())
        yield part, rows
