"""The arguments of the Triton kernels: tensors with their strides, and numbers, in named tuples.

A field that is None or a compile-time constant (``tl.constexpr``) is compiled into the kernel. Each tuple holds either
tuples or values, never both: Triton 3.6 forgets the constants of a tuple that has values beside it.

Scores are in units of log2 in all kernels. They multiply the table of numbers by log2(e) when they load it; the
products with tables of vectors are multiplied before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..call import TABLES, Call
from ..terms import allowed_span
from .blocks import LARGEST_BLOCK, cdiv, padded, precision_of


class RowMatrix(NamedTuple):
    """A (batch, heads, n, width) tensor with a contiguous last axis; keys and values may have fewer heads.

    ``data`` is None if a call has no such tensor.
    """

    data: Any
    batch: Any  # the strides of the axes
    head: Any
    row: Any
    width: Any  # a compile-time constant
    padded: Any  # the width of its tiles, a power of two: also a compile-time constant
    shared: Any  # the number of neighboring query heads that share a head: also a compile-time constant


class PairMatrix(NamedTuple):
    """A (batch, heads, n_q, n_k) tensor; ``data`` is None if a call has no such tensor."""

    data: Any
    batch: Any  # the strides of the axes
    head: Any
    row: Any
    column: Any


class Inputs(NamedTuple):
    """The tensors that are multiplied; ``query`` and ``key``, or both factors, may have no data."""

    query: RowMatrix
    key: RowMatrix
    value: RowMatrix
    query_factors: RowMatrix
    key_factors: RowMatrix
    d_out: RowMatrix  # the output's gradient; without data in the forward


class BiasTable(NamedTuple):
    """A table of numbers over offsets."""

    data: Any  # (heads, length), in natural units; None if a call has no such table
    end: Any  # the offset after the last column: in a table of every offset it divides by 16 where the lengths do
    length: Any


class VectorTable(NamedTuple):
    """A table of vectors over offsets, as its products with the rows that read it: (batch, heads, n_q, length).

    The rows that read a table of queries are those of keys: (batch, heads, n_k, length).
    """

    products: Any  # None in kernels that do not read them
    first: Any  # the offset of the first column; None if a call has no such table
    length: Any
    room: Any  # a power of two of at least the length; None if the table is long


class Products(NamedTuple):
    """How queries and keys are multiplied, and what bounds their products then."""

    scale: Any  # the factor on products, which is positive
    log2: Any  # times log2(e); or divided by the cap
    cap: Any  # in units of log2; None without a soft cap
    last: Any  # whether nothing is added to the products, so that they are scaled last: a compile-time constant
    precision: Any  # Triton's name of how products of float32 are computed: also a compile-time constant


class TableSpan(NamedTuple):
    """The offsets beyond which all tables are constant; None if no pair reads beyond the ends of any table."""

    first: Any
    last: Any


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


class ToFill(NamedTuple):
    """What the first kernel fills besides ``PairRules``; None if not needed."""

    delta: Any  # (batch, heads, n_q)
    head: Any  # its stride from head to head
    d_lse: Any  # (batch, heads, n_q), which is subtracted from delta
    seed: Any  # of dropout, from which those of rows are made


class PairRules(NamedTuple):
    """Which queries attend to which keys, at which offset, and which weights dropout removes."""

    n_q: Any
    n_k: Any
    heads: Any
    min_offset: Any  # the offsets that are allowed; None without a limit
    max_offset: Any
    start: Any  # the offset between the first query and the first key; 0 if positions are explicit
    query_stride: Any  # the strides are compile-time constants
    key_stride: Any
    query_positions: Any  # None if positions are affine
    query_positions_batch: Any
    key_positions: Any
    key_positions_batch: Any
    key_ranks: Any  # the number of earlier keys of the same block at the same position
    query_ranks: Any  # likewise; None without a table of queries
    key_mask: Any
    key_end: Any  # for each row of the batch, the index after the last key that may be attended
    query_documents: Any
    key_documents: Any
    first_keys: Any  # (batch, n_q): the first and the last key of each query's document
    last_keys: Any
    first_queries: Any  # likewise, (batch, n_k)
    last_queries: Any
    dropout_seeds: Any  # 32 bits for each row of scores
    dropout_threshold: Any
    dropout_scale: Any


class Norm(NamedTuple):
    """What turns a row's scores into weights, ``exp2(scores - shift - log_sum)``; tensors of (batch, heads, n_q).

    If ``log_sum`` is None, ``shift`` holds the sum of both, which saves a number in memory and registers. They are
    separate if terms may add large numbers, beside which ``log_sum`` would be rounded away.
    """

    shift: Any  # inf in rows that may not attend to anything
    log_sum: Any
    head: Any  # the stride of all from head to head
    delta: Any  # what softmax's gradient subtracts in each row; None in the forward


class TableSums(NamedTuple):
    """Sums over the keys of each query that read a column of a table; None if not needed.

    Those of a table of queries are sums over the queries of each key. ``ends``, (batch, heads, 2, n), are the sums at
    or beyond the ends of the table. ``rows`` are those of each column between them, in pieces, so that those of a tile
    are neighbors in memory: (batch, heads, pieces, rows, SUMS_WIDTH).
    """

    ends: Any
    rows: Any

    def by_column(self, length: int) -> Tensor:
        """Return the sums of each column, (batch, heads, n, length)."""
        ends: Tensor = self.ends
        if length == 1:
            return ends.sum(2).unsqueeze(-1)
        between = self.rows.transpose(2, 3).flatten(3)[:, :, : ends.shape[3], : length - 2]
        return torch.cat([ends[:, :, 0].unsqueeze(-1), between, ends[:, :, 1].unsqueeze(-1)], -1)


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
"""The queries that a program of the first kernel works on."""

SUMS_WIDTH, SUMS_ROWS = 32, LARGEST_BLOCK
"""The columns of a table in a piece of its sums, and what the number of rows is a multiple of."""

ROW_TABLE_NUMBERS = 256
"""The average number of products with a table of vectors that are kept per query. With a longer table, the queries are
split into parts of ``n_q * ROW_TABLE_NUMBERS`` numbers, so that memory grows only with n."""

FEWEST_TABLE_ROWS = 128
"""The fewest queries in such a part, whatever the length of the table."""

LONGEST_COMPILED = 128
"""Tables of at most this many vectors are loaded as a whole, and their offsets are compiled into the kernels."""


@lru_cache(None, typed=True)
def constant(value: int | bool | str) -> Any:
    """Wrap a value as a compile-time constant of the kernels.

    The same value is the same object: Triton looks up a compiled kernel by its constants, and would compare two objects
    in Python.
    """
    # Imported here, because not every build of torch comes with Triton.
    import triton.language as tl

    return tl.constexpr(value)


def row_matrix(tensor: Tensor | None, shared: int = 1) -> RowMatrix:
    """Describe a tensor to the kernels, each of whose heads serves ``shared`` query heads."""
    if tensor is None:
        return RowMatrix(None, None, None, None, constant(16), constant(16), constant(1))
    width = tensor.shape[3]
    if tensor.stride(3) != 1 and width != 1:
        tensor = tensor.contiguous()
    _, head, row, _ = tensor.stride()
    return RowMatrix(tensor, _across(tensor), head, row, constant(width), constant(padded(width)), constant(shared))


def _across(tensor: Tensor) -> int:
    """Return the stride of the batch; if a tensor has one row, all items read that."""
    return tensor.stride(0) if len(tensor) > 1 else 0


def level_matrix(tensor: Tensor | None) -> RowMatrix:
    """Describe levels, or their gradient, to the kernels: no product of matrices needs their tiles to be wide."""
    matrix = row_matrix(tensor)
    return matrix if tensor is None else matrix._replace(padded=constant(1 << (tensor.shape[3] - 1).bit_length()))


def pair_matrix(tensor: Tensor | None) -> PairMatrix:
    """Describe a tensor with one number per pair to the kernels."""
    return PairMatrix(*[None] * 5) if tensor is None else PairMatrix(tensor, _across(tensor), *tensor.stride()[1:])


def inputs_of(call: Call, d_out: Tensor | None = None) -> Inputs:
    """Return the tensors that the call multiplies."""
    key, value = row_matrix(call.key, call.group_size), row_matrix(call.value, call.group_size)
    return Inputs(row_matrix(call.query), key, value, *map(row_matrix, (call.query_factors, call.key_factors, d_out)))


def norm_of(sums: Tensor, delta: Tensor | None = None) -> Norm:
    """Describe what is kept of each row to the kernels, (1 or 2, batch, heads, n_q)."""
    shift, *log_sum = sums.unbind()
    return Norm(shift, log_sum[0] if log_sum else None, shift.stride(1), delta)


def new_table_sums(call: Call, name: str) -> TableSums:
    """Allocate the sums of a table; the rows have to be filled with zeros, as no kernel writes all. A bias has none."""
    n, length = call.n_k if name == "query_table" else call.n_q, getattr(call, name).shape[1]
    pieces, rows = cdiv(max(length - 2, 0), SUMS_WIDTH), cdiv(n, SUMS_ROWS) * SUMS_ROWS
    value, size = call.value, (call.value.shape[0], call.heads)
    ends = value.new_empty(*size, 2, n, dtype=torch.float32)
    if name == "bias":
        return TableSums(ends, None)
    return TableSums(ends, value.new_empty(*size, pieces, rows, SUMS_WIDTH, dtype=torch.float32))


def pairs_of(call: Call) -> PairRules:
    """Describe to the kernels which queries attend to which keys.

    This allocates ``key_end``, and the dropout seeds of rows where the call has one seed, for the first kernel.
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
        query_documents, key_documents = _same_dtype(call.query_documents, call.key_documents)
        partners = *_partners(query_documents, key_documents), *_partners(key_documents, query_documents)
    across: list[int | None] = [None, None]
    if query_positions is not None and key_positions is not None:
        query_positions, key_positions = _same_dtype(query_positions, key_positions)
        across = [_across(at) if at.dim() == 2 else 0 for at in (query_positions, key_positions)]
        key_ranks = _ranks(key_positions)
        query_ranks = None if call.query_table is None else _ranks(query_positions)
    query_start, query_stride, key_start, key_stride = call.affine
    offsets = call.min_offset, call.max_offset, key_start - query_start, constant(query_stride), constant(key_stride)
    positions = query_positions, across[0], key_positions, across[1], key_ranks, query_ranks
    mask = None if call.key_mask is None else call.key_mask.contiguous().view(torch.uint8), key_end
    documents = query_documents, key_documents, *partners
    dropout = seeds, int(call.dropout_p * 2**32), 1.0 / (1.0 - call.dropout_p)
    return PairRules(call.n_q, call.n_k, call.heads, *offsets, *positions, *mask, *documents, *dropout)


def table_matrix(table: Tensor | None, call: Call) -> RowMatrix:
    """Describe a table of vectors, (heads or 1, T, dim), to the kernels, for every item and head."""
    return row_matrix(None if table is None else table.unsqueeze(0).expand(call.value.shape[0], call.heads, -1, -1))


def _same_dtype(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Convert two tensors of ids or positions to one type that kernels can load and compare."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    elif not dtype.is_floating_point:
        dtype = torch.int64
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


def _partners(documents: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last of the ``others`` in the same document, int32 in the shape of ``documents``.

    Without any, the first is beyond the end and the last is -1.
    """
    ordered, places = others.sort(stable=True)
    bounds = [torch.searchsorted(ordered, documents, right=right) for right in (False, True)]
    none, last = bounds[0] == bounds[1], others.shape[1] - 1
    first = places.gather(1, bounds[0].clamp_max(last)).masked_fill(none, last + 1)
    return first.int(), places.gather(1, (bounds[1] - 1).clamp_min(0)).masked_fill(none, -1).int()


def _ranks(positions: Tensor) -> Tensor:
    """Count the earlier keys at the same position in each key's block; int32, in the shape of ``positions``."""
    length = positions.shape[-1]
    short = functional.pad(positions, (0, -length % LARGEST_BLOCK)).unflatten(-1, (-1, LARGEST_BLOCK))
    same = short.unsqueeze(-1) == short.unsqueeze(-2)
    return same.tril(-1).sum(-1, dtype=torch.int32).flatten(-2)[..., :length].contiguous()


def terms_of(call: Call, products: dict[str, Tensor | None]) -> Terms:
    """Return what makes the call's scores, with the products of ``VectorTable`` by the names of tables of vectors."""
    spans = [(first, table.shape[1]) for first, table in zip(call.first, call.tables, strict=True) if table is not None]
    first = last = None
    # If some pairs read beyond the ends of one table, the span is that of all: beyond it, every table is constant.
    if not all(covers(call, *span) for span in spans):
        first, last = min(first for first, _ in spans), max(first + length - 1 for first, length in spans)
    bias = BiasTable(None, None, None)
    if call.bias is not None:
        length = call.bias.shape[1]
        bias = BiasTable(call.bias.contiguous(), call.first[0] + length, length)
    log2, cap = call.scale * LOG2E, None
    if call.softcap is not None:
        log2, cap = call.scale / call.softcap, call.softcap * LOG2E
    added = call.bias, call.key_table, call.query_table, call.query_factors, call.query_levels, call.dense, cap
    last_scaled, precision = constant(all(each is None for each in added)), constant(precision_of(call))
    return Terms(
        Products(call.scale, log2, cap, last_scaled, precision),
        TableSpan(first, last),
        bias,
        _vector_table(call, "key_table", products),
        _vector_table(call, "query_table", products),
        _vector_table(call, "value_table", products),
        level_matrix(call.query_levels),
        level_matrix(call.key_levels),
        pair_matrix(call.dense),
    )


def has_diagonals(call: Call) -> bool:
    """Whether all pairs on a diagonal of scores have one offset: positions are affine, with one stride."""
    return call.query_positions is None and call.affine[1] == call.affine[3]


def covers(call: Call, first: int, length: int) -> bool:
    """Whether no pair of the call reads beyond the ends of a table; False for explicit positions."""
    span = allowed_span(*call.positions(), call.min_offset, call.max_offset)
    return span is not None and first <= span[0] and span[1] < first + length


def _vector_table(call: Call, name: str, found: dict[str, Tensor | None]) -> VectorTable:
    table, first, products = getattr(call, name), call.first[TABLES.index(name)], found.get(name)
    if table is None:
        return VectorTable(None, None, None, None)
    length = table.shape[1]
    if length > LONGEST_COMPILED:
        return VectorTable(products, first, length, None)
    if covers(call, first, length):
        # In short sequences tables end where offsets do: kernels would be compiled for every length.
        return VectorTable(products, first, length, constant(padded(length)))
    return VectorTable(products, constant(first), constant(length), constant(padded(length)))


def parts_of(call: Call, size: int | None = None) -> Iterator[tuple[Call, range]]:
    """Split a call into runs of ``size`` queries; by default of so many that their products with tables of vectors take
    little memory, which mostly are all.

    Each comes with its rows. If they are not all, its seed is those of its rows, in the 32 bits that the kernels take.
    """
    n_q = call.n_q
    if size is None:
        longest = max([1, *(table.shape[1] for table in (call.key_table, call.value_table) if table is not None)])
        size = n_q if longest <= ROW_TABLE_NUMBERS else max(FEWEST_TABLE_ROWS, n_q * ROW_TABLE_NUMBERS // longest)
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
