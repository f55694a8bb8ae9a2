"""Tables over the offsets between two grids: written out, or as one row of numbers.

Give cell (r, c) the position ``r * pitch + c``, where the pitch is the number of column offsets between the two grids.
Then a difference of two positions tells both offsets, and a table over rows and columns becomes one over a single
offset, without an entry too many. Three more entries serve the tokens without a place. Every backend with tables over
offsets can read such a row; it has O(n) numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from .call import Call, check_heads_tensor
from .terms import FactorPair, GridPositions, OffsetBias, OffsetBias2d, as_pair, check_shape, offsets_between

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class CellOffsets:
    """The offsets between the cells of two grids, as a row of ``length`` numbers.

    The row has an entry for pairs of a prefix's query and a cell's key, then one per offset of cells, row by row, then
    one for pairs of two prefixes, then one for a cell's query and a prefix's key.

    Args:
        query_rows, query_columns, query_prefix: the sides and the prefix of the grid of queries.
        key_rows, key_columns, key_prefix: those of the grid of keys.
    """

    query_rows: int
    query_columns: int
    query_prefix: int
    key_rows: int
    key_columns: int
    key_prefix: int

    @classmethod
    def between(cls, queries: GridPositions, keys: GridPositions) -> CellOffsets:
        """Return the offsets between two grids, whatever their origins."""
        return cls(queries.rows, queries.columns, queries.prefix, keys.rows, keys.columns, keys.prefix)

    def sizes(self) -> list[int]:
        """Return the fields in their order."""
        return [
            *(self.query_rows, self.query_columns, self.query_prefix),
            *(self.key_rows, self.key_columns, self.key_prefix),
        ]

    def counts(self) -> tuple[int, int]:
        """Return the numbers of queries and of keys."""
        return (
            self.query_prefix + self.query_rows * self.query_columns,
            self.key_prefix + self.key_rows * self.key_columns,
        )

    @property
    def rows(self) -> int:
        """The number of row offsets."""
        return self.query_rows + self.key_rows - 1

    @property
    def pitch(self) -> int:
        """The number of column offsets."""
        return self.query_columns + self.key_columns - 1

    @property
    def length(self) -> int:
        return self.rows * self.pitch + 3

    @property
    def first(self) -> int:
        """The offset of the row's first entry between ``positions``."""
        return -(self.query_rows - 1) * self.pitch - self.query_columns

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return positions of the queries (n_q,) and of the keys (n_k,): their offset is that of the entry to read.

        Offsets of the prefixes lie beyond the row's ends, or between its last two entries.
        """
        queries, keys = (
            (torch.arange(rows, device=device).unsqueeze(1) * self.pitch + torch.arange(columns, device=device)).ravel()
            for rows, columns in ((self.query_rows, self.query_columns), (self.key_rows, self.key_columns))
        )
        last = (self.key_rows - 1) * self.pitch + self.key_columns - 1
        far = last - self.first
        prefixes = queries.new_full((self.query_prefix,), far), keys.new_full((self.key_prefix,), far + last + 1)
        return torch.cat((prefixes[0], queries)), torch.cat((prefixes[1], keys))

    def row_of(self, term: OffsetBias2d) -> Tensor:
        """Return a term as a row, (heads, length), with the end values wherever its table ends."""
        device, (_, table_rows, table_columns) = term.table.device, term.table.shape
        # The entries of the table, before its first one or beyond its last, that the smallest offsets read
        low_row, low_column = (
            key - query - (lines - 1) - first
            for key, query, lines, first in zip(
                term.keys.start, term.queries.start, (self.query_rows, self.query_columns), term.first, strict=True
            )
        )
        row = (torch.arange(self.rows, device=device) + low_row).clamp(0, table_rows - 1)
        column = (torch.arange(self.pitch, device=device) + low_column).clamp(0, table_columns - 1)
        cells = term.table[:, row][:, :, column].flatten(1)
        prefix = prefix_of(term)
        return torch.cat((prefix[:, :1], cells, prefix[:, 2:], prefix[:, 1:2]), 1)


def prefix_of(term: OffsetBias2d) -> Tensor:
    """Return what a term adds to the three kinds of pairs with a prefix, (heads, 3)."""
    return term.table.new_zeros(len(term.table), 3) if term.prefix is None else term.prefix.to(term.table.dtype)


def written_out(term: OffsetBias2d) -> Tensor:
    """Return what a term adds to every pair, (heads, n_q, n_k): its definition."""
    device = term.table.device
    (query_rows, query_columns), (key_rows, key_columns) = (_cells(grid, device) for grid in (term.queries, term.keys))
    row = (offsets_between(query_rows, key_rows) - term.first[0]).clamp(0, term.table.shape[1] - 1)
    column = (offsets_between(query_columns, key_columns) - term.first[1]).clamp(0, term.table.shape[2] - 1)
    cells = term.table[:, row, column]
    from_prefix, to_prefix, within = prefix_of(term)[:, :, None, None].unbind(1)
    queries, keys = term.queries.prefix, term.keys.prefix
    above = torch.cat((within.expand(-1, queries, keys), from_prefix.expand(-1, queries, cells.shape[2])), 2)
    below = torch.cat((to_prefix.expand(-1, cells.shape[1], keys), cells), 2)
    return torch.cat((above, below), 1)


def _cells(grid: GridPositions, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column of every cell, each (cells,)."""
    index = torch.arange(grid.rows * grid.columns, device=device)
    return index // grid.columns + grid.start[0], index % grid.columns + grid.start[1]


def merged(terms: Sequence[OffsetBias2d], dtype: torch.dtype) -> tuple[Tensor | None, list[int]]:
    """Sum terms between the same grids into one row; return it with the sizes of the grids, or None and no sizes."""
    if not terms:
        return None, []
    offsets = CellOffsets.between(terms[0].queries, terms[0].keys)
    rows = [offsets.row_of(term).to(dtype) for term in terms]
    return sum(rows[1:], rows[0]), offsets.sizes()


def in_one_dimension(call: Call) -> Call:
    """Return a call with an ``OffsetBias`` between positions of its own in place of each :class:`OffsetBias2d`.

    The call must need no other positions.
    """
    terms = [term for term in call.terms if isinstance(term, OffsetBias2d)]
    if not terms:
        return call
    offsets = CellOffsets.between(terms[0].queries, terms[0].keys)
    queries, keys = offsets.positions(call.device)
    others = tuple(term for term in call.terms if not isinstance(term, OffsetBias2d))
    biases = tuple(OffsetBias(offsets.row_of(term), offsets.first) for term in terms)
    return replace(call, terms=(*others, *biases), given_query_positions=queries, given_key_positions=keys)


def decomposed_offset_keys(
    query: Float[Tensor, "batch heads n_q head_dim"],
    row_table: Float[Tensor, "#heads _rows head_dim"],
    column_table: Float[Tensor, "#heads _columns head_dim"],
    first: tuple[int, int],
    queries: GridPositions,
    keys: GridPositions,
) -> FactorPair:
    """Return ``score_ij += <query_i, row_table[h, row offset] + column_table[h, column offset]>`` as a term.

    This is the decomposed relative position of MViTv2 and of Segment Anything (SAM). It is not scaled. Pairs with a
    token of a prefix get 0.

    Args:
        query: (batch, heads, n_q, head_dim).
        row_table: (heads or 1, T, head_dim), a vector per row offset; offsets beyond its ends read the end vectors. It
            may have another floating-point dtype than the query.
        column_table: the same over column offsets.
        first: the row offset of the first vector of ``row_table``, and the column offset of that of ``column_table``.
        queries: where the queries are.
        keys: where the keys are.

    Returns:
        A term with a factor per row and a factor per column of the grid of keys.

    Raises:
        TypeError, ValueError: for input that does not fit.

    Source: Li et al. (2022), arXiv 2112.01526, eq. 4; Kirillov et al. (2023), arXiv 2304.02643.
    """
    check_heads_tensor("query", query)
    first = as_pair("decomposed_offset_keys: first", first)
    for name, grid in (("queries", queries), ("keys", keys)):
        if not isinstance(grid, GridPositions):
            raise TypeError(f"{name}: expected GridPositions, got {type(grid).__name__}")
    for name, table in (("row_table", row_table), ("column_table", column_table)):
        heads, head_dim = query.shape[1], query.shape[3]
        check_shape(name, table, (("heads", (1, heads)), ("T", None), ("head_dim", (head_dim,))))
        if table.shape[1] == 0:
            raise ValueError(f"{name}: needs at least one offset, got {tuple(table.shape)}")
        if table.device != query.device:
            raise ValueError(f"{name}: expected the query's device {query.device}, got {table.device}")
    if queries.length != query.shape[2]:
        raise ValueError(f"queries: expected {query.shape[2]} tokens, got {queries}")
    cells = query[:, :, queries.prefix :].unflatten(2, (queries.rows, queries.columns))
    rows = _vectors(row_table.to(query.dtype), first[0], (queries.rows, queries.start[0]), (keys.rows, keys.start[0]))
    columns = _vectors(
        column_table.to(query.dtype), first[1], (queries.columns, queries.start[1]), (keys.columns, keys.start[1])
    )
    by_row = torch.einsum("bhrcd,hrkd->bhrck", cells, rows.expand(query.shape[1], -1, -1, -1))
    by_column = torch.einsum("bhrcd,hckd->bhrck", cells, columns.expand(query.shape[1], -1, -1, -1))
    query_factors = functional.pad(torch.cat((by_row, by_column), -1).flatten(2, 3), (0, 0, queries.prefix, 0))
    row, column = _cells(replace(keys, start=(0, 0)), query.device)
    places = torch.cat((functional.one_hot(row, keys.rows), functional.one_hot(column, keys.columns)), 1)
    key_factors = functional.pad(places.to(query.dtype), (0, 0, keys.prefix, 0))
    return FactorPair(query_factors, key_factors.expand(1, query.shape[1], -1, -1))


def _vectors(table: Tensor, first: int, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Return the vector at each offset, (heads or 1, queries, keys, head_dim), of lines with a length and a start."""
    query_lines, key_lines = (torch.arange(length, device=table.device) + start for length, start in (queries, keys))
    return table[:, (offsets_between(query_lines, key_lines) - first).clamp(0, table.shape[1] - 1)]
