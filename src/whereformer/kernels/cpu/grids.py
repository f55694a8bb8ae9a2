"""How tiles read a table over the offsets between two grids, and sum into it.

The queries of one column read the same columns of the table, whatever their row. So this part of the table is laid out
once per column, and what is added to a query's scores is one slice of it. In a wide grid that would be too much memory.
There the table itself is repeated, and what is added to a row of queries is a view of that. For few scores per head,
what the table adds is written out once for all batch items instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .. import tuning
from ..grids import CellOffsets
from .tiles import Span, Tile, chunks
from .workspace import Workspace


class StridedGrid:
    """A number per head and offset between two grids, for a piece with all queries and keys.

    Args:
        offsets: the offsets between the grids.
        values: (heads, offsets.length), a row as :class:`CellOffsets` describes it.
    """

    def __init__(self, offsets: CellOffsets, values: Tensor) -> None:
        self.offsets, self.values = offsets, values

    @cached_property
    def sums(self) -> Tensor:
        """What was collected, (heads, offsets.length), besides ``sums_by_column``."""
        return torch.zeros_like(self.values)

    @cached_property
    def sums_by_column(self) -> Tensor | None:
        """What was collected by column of the queries, (heads, query columns, row offsets, key columns)."""
        offsets = self.offsets
        size = len(self.values), offsets.query_columns, offsets.rows, offsets.key_columns
        return None if _is_wide(offsets) else self.values.new_zeros(size)

    def reader(self, heads: range, workspace: Workspace, tile_rows: int | None = None) -> StridedGridReader:
        """Return a reader for tiles of some heads."""
        return StridedGridReader(self.offsets, self.values[heads.start : heads.stop], workspace)

    def collect(self, tile: Tile, heads: range) -> None:
        """Add a tile of score gradients to the table's gradient."""
        self.collect_scores(sum_over_items(tile.scores, heads), tile.span.queries, heads)

    def collect_scores(self, scores: Tensor, queries: range, heads: range) -> None:
        """Add score gradients (heads, queries, n_k), which batch items share, to the table's gradient."""
        offsets, sums = self.offsets, self.sums[heads.start : heads.stop]
        above, left = max(0, min(offsets.query_prefix, queries.stop) - queries.start), offsets.key_prefix
        for column, part in (
            (0, scores[:, :above, left:]),
            (-2, scores[:, :above, :left]),
            (-1, scores[:, above:, :left]),
        ):
            if part.numel():
                sums[:, column].add_(part.sum((1, 2)))
        cells = sums[:, 1:-2].unflatten(1, (offsets.rows, offsets.pitch))
        whole = scores[:, above:, left:].unflatten(2, (offsets.key_rows, offsets.key_columns))
        first = 0
        for rows, columns in rectangles(queries, offsets.query_prefix, offsets.query_columns):
            count = len(rows) * len(columns)
            part = whole[:, first : first + count].unflatten(1, (len(rows), len(columns)))
            if self.sums_by_column is None:
                part, where = _sum_diagonals(part), offsets.query_columns - columns.stop
                targets = _by_row(cells[..., where : where + part.shape[3]], rows, offsets)
            else:
                by_column = self.sums_by_column[heads.start : heads.stop, columns.start : columns.stop]
                targets = _by_row(by_column, rows, offsets)
            for target, numbers in zip(targets, part.unbind(1), strict=True):
                target.add_(numbers)
            first += count

    def add_to(self, gradient: Tensor) -> None:
        """Add everything that was collected to the table's gradient, (heads, offsets.length)."""
        gradient += self.sums
        if self.sums_by_column is not None:
            gradient[:, 1:-2].add_(_sum_diagonals(self.sums_by_column.unsqueeze(1)).flatten(1))


class StridedGridReader:
    """A table over the offsets between two grids in the form in which tiles of some heads read it.

    Its memory has the table's part for each column of queries, (heads, query columns, row offsets, key columns). In a
    wide grid each row of it repeats the table, as in ``GridReader``.

    Args:
        values: (heads, offsets.length).
    """

    def __init__(self, offsets: CellOffsets, values: Tensor, workspace: Workspace) -> None:
        self.offsets = offsets
        cells = values[:, 1:-2]
        self.from_prefix, self.within, self.to_prefix = values[:, [0, -2, -1], None, None].unbind(1)
        self.is_wide, self.copies = _is_wide(offsets), min(tuning.REPEATED_ROWS, offsets.query_columns)
        if self.is_wide:
            self.memory = workspace.take((len(values), self.copies, cells.shape[1]), values.dtype)
            self.memory.copy_(cells.unsqueeze(1).expand_as(self.memory))
        else:
            size = len(values), offsets.query_columns, offsets.rows, offsets.key_columns
            self.memory = workspace.take(size, values.dtype)
            parts = cells.unflatten(1, (offsets.rows, offsets.pitch)).unfold(2, offsets.key_columns, 1)
            # The last column of queries reads the first part.
            self.memory.copy_(parts.flip(2).transpose(1, 2))

    def add_to(self, scores: Tensor, span: Span) -> None:
        """Add to a tile's scores, (batch, heads, rows, n_k)."""
        offsets = self.offsets
        above = max(0, min(offsets.query_prefix, span.queries.stop) - span.queries.start)
        left = offsets.key_prefix
        scores[:, :, :above, :left].add_(self.within)
        scores[:, :, :above, left:].add_(self.from_prefix)
        scores[:, :, above:, :left].add_(self.to_prefix)
        cells = scores[:, :, above:, left:].unflatten(3, (offsets.key_rows, offsets.key_columns))
        first = 0
        for rows, columns in rectangles(span.queries, offsets.query_prefix, offsets.query_columns):
            count = len(rows) * len(columns)
            targets = cells[:, :, first : first + count].unflatten(2, (len(rows), len(columns))).unbind(2)
            first += count
            if not self.is_wide:
                views = _by_row(self.memory[:, columns.start : columns.stop], rows, offsets)
                for target, view in zip(targets, views, strict=True):
                    target.add_(view)
                continue
            for row, target in zip(rows, targets, strict=True):
                for some in chunks(columns, self.copies):
                    part = target[:, :, some.start - columns.start : some.stop - columns.start]
                    part.add_(self._view_of_table(row, some))

    def _view_of_table(self, row: int, columns: range) -> Tensor:
        """Return what is added to some queries of a row, (heads, queries, key rows, key columns)."""
        offsets, memory = self.offsets, self.memory
        start = (offsets.query_rows - 1 - row) * offsets.pitch + offsets.query_columns - 1 - columns.start
        size = (memory.shape[0], len(columns), offsets.key_rows, offsets.key_columns)
        strides = (memory.stride(0), memory.stride(1) - 1, offsets.pitch, 1)
        return memory.as_strided(size, strides, memory.storage_offset() + start)


class WrittenOutGrid:
    """Does the job of :class:`StridedGrid` in a number per head and pair, for any piece of few queries and keys.

    Args:
        queries, keys: those of the piece.
    """

    def __init__(self, offsets: CellOffsets, values: Tensor, queries: range, keys: range) -> None:
        self.strided = StridedGrid(offsets, values)
        self.queries, self.keys = queries, keys
        self.every = range(offsets.counts()[0])

    @cached_property
    def whole(self) -> Tensor:
        """Return what is added, (heads, n_q, n_k)."""
        values = self.strided.values
        n_q, n_k = self.strided.offsets.counts()
        whole = values.new_zeros(len(values), n_q, n_k)
        workspace = Workspace(values.device)
        reader = self.strided.reader(range(len(values)), workspace)
        reader.add_to(whole.unsqueeze(0), Span(self.every, range(n_k)))
        workspace.close()
        return whole

    @cached_property
    def sums(self) -> Tensor:
        """What was collected, (heads, n_q, n_k)."""
        return self.strided.values.new_zeros(len(self.strided.values), *self.strided.offsets.counts())

    def reader(self, heads: range, workspace: Workspace, tile_rows: int | None = None) -> WrittenOutReader:
        return WrittenOutReader(self, heads)

    def part(self, pairs: Tensor, span: Span, heads: range) -> Tensor:
        """Return a tile's part of (heads, n_q, n_k), as a view."""
        queries, keys = (
            whole[part.start : part.stop] for whole, part in ((self.queries, span.queries), (self.keys, span.keys))
        )
        return pairs[heads.start : heads.stop, queries.start : queries.stop, keys.start : keys.stop]

    def collect(self, tile: Tile, heads: range) -> None:
        target = self.part(self.sums, tile.span, heads)
        target += sum_over_items(tile.scores, heads)

    def add_to(self, gradient: Tensor) -> None:
        self.strided.collect_scores(self.sums, self.every, range(len(self.sums)))
        self.strided.add_to(gradient)


class WrittenOutReader:
    """Does the job of :class:`StridedGridReader` for a :class:`WrittenOutGrid`."""

    def __init__(self, grid: WrittenOutGrid, heads: range) -> None:
        self.grid, self.heads = grid, heads

    def add_to(self, scores: Tensor, span: Span) -> None:
        """Add to a tile's scores, (batch, heads, rows, columns)."""
        scores += self.grid.part(self.grid.whole, span, self.heads)


def _by_row(table: Tensor, rows: range, offsets: CellOffsets) -> list[Tensor]:
    """Return the part of a table (..., row offsets, any) that each row of queries reads, (..., key rows, any)."""
    lines = table[..., offsets.query_rows - rows.stop : offsets.rows - rows.start, :]
    return list(lines.unfold(-2, offsets.key_rows, 1).transpose(-1, -2).unbind(-3))[::-1]


def _is_wide(offsets: CellOffsets) -> bool:
    """Whether laying the table out for each column of queries would take too much memory."""
    return offsets.query_columns > tuning.REPEATED_ROWS


def sum_over_items(scores: Tensor, heads: range) -> Tensor:
    """Sum a tile's scores (groups, rows, columns) over batch items: (heads, rows, columns)."""
    by_item = scores.unflatten(0, (-1, len(heads)))
    return by_item[0] if len(by_item) == 1 else by_item.sum(0)


def rectangles(queries: range, prefix: int, columns: int) -> Iterator[tuple[range, range]]:
    """Cut some queries, without those of a prefix, into rectangles of cells as ranges of rows and of columns.

    A rectangle of several rows has all columns.
    """
    cell, stop = max(0, queries.start - prefix), max(0, queries.stop - prefix)
    while cell < stop:
        row, column = divmod(cell, columns)
        if column == 0 and stop - cell >= columns:
            rows = range(row, stop // columns)
            yield rows, range(columns)
            cell = rows.stop * columns
        else:
            end = min(columns, column + stop - cell)
            yield range(row, row + 1), range(column, end)
            cell += end - column


def _sum_diagonals(scores: Tensor) -> Tensor:
    """Sum scores over queries by column offset.

    Args:
        scores: (heads, query rows, query columns, key rows, key columns).

    Returns:
        (heads, query rows, key rows, query columns + key columns - 1), from the smallest offset to the largest.
    """
    heads, rows, queries, lines, keys = scores.shape
    pitch = queries + keys - 1
    # Each row of keys has zeros on both sides; read with a query's pitch that is longer by one, diagonals are columns.
    memory = scores.new_zeros(heads * rows * queries * lines * pitch + 2 * (queries - 1))
    strides = (rows * queries * lines * pitch, queries * lines * pitch, lines * pitch, pitch, 1)
    memory.as_strided(scores.shape, strides, queries - 1).copy_(scores)
    skewed = (heads, rows, queries, lines, pitch), (*strides[:2], strides[2] + 1, *strides[3:])
    return memory.as_strided(*skewed).sum(2)
