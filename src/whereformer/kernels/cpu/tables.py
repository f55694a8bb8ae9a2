"""How tiles read tables over offsets and sum into them: by strides for affine positions, else entry by entry.

Everything here belongs to one piece: its layout of offsets, and its tables in that layout.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from .. import tuning
from ..grids import CellOffsets
from ..problem import Problem
from ..terms import Positions, PositionsLike, offsets_between, position_values
from .grids import StridedGrid, StridedGridReader, WrittenOutGrid, WrittenOutReader
from .pieces import Piece
from .tiles import Span, Tile, chunks
from .workspace import Workspace


class Grid:
    """Offsets between affine positions: ``base + unit * (column - step * row)`` with an integer ``step``.

    ``column - step * row`` is called *m* below; it runs over ``range(low, low + count)``.
    """

    def __init__(self, base: int, unit: int, step: int, n_q: int, n_k: int, device: torch.device) -> None:
        self.base, self.unit, self.step = base, unit, step
        self.n_q, self.n_k = n_q, n_k
        self.low, self.count = -step * (n_q - 1), step * (n_q - 1) + n_k
        self.device = device

    def lowest(self, span: Span) -> int:
        """Return the m of a tile's last query and first key."""
        return span.keys.start - self.step * (span.queries.stop - 1)

    def window(self, first: int, length: int) -> range:
        """Return the range of m in which a table of ``length`` offsets from ``first`` is not constant."""
        start = (first - self.base) // self.unit
        stop = -((self.base - first - length + 1) // self.unit)
        start, stop = (max(self.low, min(self.low + self.count - 1, m)) for m in (start, stop))
        return range(start, max(start, stop) + 1)

    def rows(self, first: int, length: int, window: range | None = None) -> Tensor:
        """Return the row of a table that each m of a window reads; by default the window is every m."""
        window = range(self.low, self.low + self.count) if window is None else window
        m = torch.arange(window.start, window.stop, device=self.device)
        return (self.base + self.unit * m - first).clamp(0, length - 1)

    def reach(self, min_offset: int | None, max_offset: int | None) -> range:
        """Return the range of m whose offsets are within limits."""
        start, stop = self.low, self.low + self.count
        if min_offset is not None:
            start = max(start, -((self.base - min_offset) // self.unit))
        if max_offset is not None:
            stop = min(stop, (max_offset - self.base) // self.unit + 1)
        return range(start, max(start, stop))

    def keys_of(self, queries: range, reach: range) -> range:
        """Return the keys from the first to the last that some of these queries reach."""
        if not reach:
            return range(0)
        start = min(self.n_k, max(0, reach.start + self.step * queries.start))
        return range(start, max(start, min(self.n_k, reach.stop + self.step * (queries.stop - 1))))


class Listed:
    """Offsets between explicit positions, pair by pair."""

    def __init__(self, query_positions: Tensor, key_positions: Tensor) -> None:
        self.query_positions, self.key_positions = query_positions, key_positions

    def offsets(self, span: Span) -> Tensor:
        """Return the offsets of a tile, (rows, columns)."""
        queries = self.query_positions[span.queries.start : span.queries.stop]
        return offsets_between(queries, self.key_positions[span.keys.start : span.keys.stop])

    def entries(self, span: Span, first: int, length: int) -> Tensor:
        """Return the entry that each pair of a tile reads, (rows, columns), of ``length`` offsets from ``first``."""
        return (self.offsets(span) - first).clamp(0, length - 1)


def layout(query_positions: PositionsLike, key_positions: PositionsLike, device: torch.device) -> Grid | Listed:
    """Return the layout of a piece's offsets: a grid, unless its diagonals would be far longer than the piece."""
    if isinstance(query_positions, Positions) and isinstance(key_positions, Positions):
        unit, step = _steps(query_positions, key_positions)
        if step is not None:
            base = key_positions.start - query_positions.start
            return Grid(base, unit, step, query_positions.length, key_positions.length, device)
    return Listed(position_values(query_positions, device), position_values(key_positions, device))


def is_grid(query_positions: PositionsLike, key_positions: PositionsLike) -> bool:
    """Whether the offsets between these positions are laid out as a grid."""
    if isinstance(query_positions, Positions) and isinstance(key_positions, Positions):
        return _steps(query_positions, key_positions)[1] is not None
    return False


def _steps(query_positions: Positions, key_positions: Positions) -> tuple[int, int | None]:
    """Return the unit of a grid, and its step if there can be one."""
    query_stride, key_stride = query_positions.stride, key_positions.stride
    if query_positions.length == 1:
        query_stride = key_stride
    if key_positions.length == 1:
        key_stride = query_stride
    step = query_stride // key_stride
    fits = query_stride % key_stride == 0 and (step <= tuning.MOST_STEP or query_positions.length == 1)
    return key_stride, step if fits else None


class GridBias:
    """A number per head and offset on a grid: what an ``OffsetBias`` with ``table`` (heads, T) adds.

    It is -inf for each m outside ``reach``, which causality or a window forbids.
    """

    def __init__(self, grid: Grid, table: Tensor, first: int, reach: range) -> None:
        self.grid, self.table, self.reach = grid, table, reach
        self.window = grid.window(first, table.shape[1])
        self.index = grid.rows(first, table.shape[1])
        self.sums = table.new_zeros(len(table), grid.count)

    @cached_property
    def values(self) -> Tensor:
        """Return what is added at each m, (heads, grid.count)."""
        values = self.table[:, self.index]
        values[:, : self.reach.start - self.grid.low] = -torch.inf
        values[:, self.reach.stop - self.grid.low :] = -torch.inf
        return values

    def whole(self) -> Tensor:
        """Return what is added, (heads, n_q, n_k)."""
        return self.reversed_rows(range(len(self.values))).flip(1)

    def reversed_rows(self, heads: range) -> Tensor:
        """Return what is added, (heads, n_q, n_k), the last query first: a view of the table with positive strides."""
        values, grid = self.values[heads.start : heads.stop], self.grid
        strides = values.stride(0), grid.step, 1
        return values.as_strided((len(values), grid.n_q, grid.n_k), strides, values.storage_offset())

    def reader(
        self, heads: range, workspace: Workspace, rows: int = tuning.REPEATED_ROWS, tile_rows: int | None = None
    ) -> GridReader:
        """Return a reader for tiles of some heads.

        Args:
            heads: the heads.
            workspace: where its memory comes from.
            rows: the number of a tile's rows that are read at a time.
            tile_rows: the rows of the largest tile, whose keys are those that its queries reach; None: any keys.
        """
        grid = self.grid
        read = range(grid.low, grid.low + grid.count)
        if tile_rows is not None:
            margin = grid.step * (tile_rows - 1)
            read = range(max(read.start, self.reach.start - margin), min(read.stop, self.reach.stop + margin))
        values = self.values[heads.start : heads.stop, read.start - grid.low : read.stop - grid.low]
        return GridReader(values, read.start, grid.step, min(rows, grid.n_q), workspace)

    def collect(self, tile: Tile, heads: range) -> None:
        """Add a tile of score gradients to the table's gradient."""
        start, width = self.grid.lowest(tile.span), tile.skewed.shape[2]
        sums = self.sums[heads.start : heads.stop, start - self.grid.low :]
        if start >= self.window.stop - 1 or start + width <= self.window.start + 1:
            # The whole tile reads the same entry of the table, so any of its m will do.
            found = tile.scores.sum((1, 2)).unsqueeze(1)
        else:
            found = tile.skewed.sum(1)
        if len(found) > len(heads):
            found = found.unflatten(0, (-1, len(heads))).sum(0)
        sums[:, : found.shape[1]].add_(found)

    def add_to(self, gradient: Tensor) -> None:
        """Add everything that was collected to the table's gradient, (heads, T)."""
        gradient.index_add_(1, self.index, self.sums)


class GridReader:
    """A table of numbers in the form in which tiles of some heads read it.

    Each row of its memory repeats the table, so that a tile's row begins ``step`` entries before the one above. The few
    rows stay in the cache.

    Args:
        values: (heads, count), one for each m from ``low`` on.
        low: the first m.
        step: the step of the grid.
        rows: the number of a tile's rows that are read at a time.
    """

    def __init__(self, values: Tensor, low: int, step: int, rows: int, workspace: Workspace) -> None:
        self.low, self.step, self.rows = low, step, rows
        self.memory = workspace.take((len(values), rows, values.shape[1]), values.dtype)
        self.memory.copy_(values.unsqueeze(1).expand_as(self.memory))

    def view(self, span: Span) -> Tensor:
        """Return what is added to at most ``rows`` queries, (heads, rows, columns)."""
        memory = self.memory
        start = memory.storage_offset() + span.keys.start - self.step * span.queries.start - self.low
        size = (memory.shape[0], len(span.queries), len(span.keys))
        return memory.as_strided(size, (memory.stride(0), memory.shape[2] - self.step, 1), start)

    def add_to(self, scores: Tensor, span: Span) -> None:
        """Add to a tile's scores, (batch, heads, rows, columns)."""
        first = span.queries.start
        for queries in chunks(span.queries, self.rows):
            scores[:, :, queries.start - first : queries.stop - first].add_(self.view(Span(queries, span.keys)))


class ListedReader:
    """Does the job of :class:`GridReader` for explicit positions."""

    def __init__(self, bias: ListedBias, heads: range) -> None:
        self.bias, self.heads = bias, heads

    def add_to(self, scores: Tensor, span: Span) -> None:
        """Add to a tile's scores, (batch, heads, rows, columns)."""
        entries = self.bias.offsets.entries(span, self.bias.first, self.bias.values.shape[1])
        scores += self.bias.values[self.heads.start : self.heads.stop, entries]


class GridVectors:
    """A vector per offset on a grid, for ``OffsetKeys`` and ``OffsetValues``: each query gets a number per offset from
    it.

    ``vectors`` (heads or 1, T, dim) are the table's rows that occur in tiles; the first and the last also stand for all
    offsets beyond. ``sums`` has the same shape and collects their gradient.
    """

    def __init__(self, grid: Grid, table: Tensor, first: int) -> None:
        self.grid = grid
        self.window = grid.window(first, table.shape[1])
        self.index = grid.rows(first, table.shape[1], self.window)
        self.vectors = table[:, self.index]
        self.sums = torch.zeros_like(self.vectors)

    def of_rows(self, queries: range) -> GridVectors:
        """Return the part of the table that some queries can read, in the same memory."""
        grid, window = self.grid, self.window
        low = max(window.start, -grid.step * (queries.stop - 1))
        high = min(window.stop, grid.n_k - grid.step * queries.start)
        if high <= low:
            # They read only one end of the table.
            low = window.start if high <= window.start else window.stop - 1
            high = low + 1
        part = copy(self)
        part.window = range(low, high)
        columns = slice(low - window.start, high - window.start)
        part.vectors, part.sums = self.vectors[:, columns], self.sums[:, columns]
        return part

    def spread(self, per_offset: Tensor, tile: Tile) -> None:
        """Write to each pair of the tile its number from (groups, rows, T)."""
        for part, columns in self._parts(tile):
            part.copy_(per_offset[..., columns].expand_as(part))
        tile.clear_margins()

    def collect(self, tile: Tile, per_offset: Tensor) -> None:
        """Add each query's scores by offset to (groups, rows, T)."""
        for part, columns in self._parts(tile):
            target = per_offset[..., columns]
            target += part if target.shape[-1] == part.shape[-1] else part.sum(-1, keepdim=True)

    def _parts(self, tile: Tile) -> list[tuple[Tensor, slice]]:
        """Cut the tile into views with one column per offset, each with the offsets that it reads."""
        size, start = len(self.window), self.window.start - self.grid.lowest(tile.span)
        width = tile.skewed.shape[2]
        if start >= width - 1:
            return [(tile.scores, slice(0, 1))]
        if start + size <= 1:
            return [(tile.scores, slice(size - 1, size))]
        left, right = max(start, 0), min(start + size, width)
        parts = [(tile.skewed[..., left:right], slice(left - start, right - start))]
        if left > 0:
            parts.append((tile.skewed[..., :left], slice(0, 1)))
        if right < width:
            parts.append((tile.skewed[..., right:], slice(size - 1, size)))
        return parts

    def add_to(self, gradient: Tensor) -> None:
        """Add ``sums`` to the table's gradient, (heads or 1, T, dim)."""
        gradient.index_add_(1, self.index, self.sums)


class ListedBias:
    """Does the job of :class:`GridBias` for explicit positions."""

    def __init__(self, offsets: Listed, table: Tensor, first: int) -> None:
        self.offsets, self.values, self.first = offsets, table, first
        self.sums = torch.zeros_like(table)

    def reader(self, heads: range, workspace: Workspace, tile_rows: int) -> ListedReader:
        return ListedReader(self, heads)

    def collect(self, tile: Tile, heads: range) -> None:
        entries = self.offsets.entries(tile.span, self.first, self.values.shape[1]).flatten()
        by_head = tile.scores.unflatten(0, (-1, len(heads))).sum(0)
        self.sums[heads.start : heads.stop].index_add_(1, entries, by_head.flatten(1))

    def add_to(self, gradient: Tensor) -> None:
        gradient += self.sums


class ListedVectors:
    """Does the job of :class:`GridVectors` for explicit positions."""

    def __init__(self, offsets: Listed, table: Tensor, first: int) -> None:
        self.offsets, self.vectors, self.first = offsets, table, first
        self.sums = torch.zeros_like(table)

    def of_rows(self, queries: range) -> ListedVectors:
        return self

    def _entries(self, tile: Tile) -> Tensor:
        return self.offsets.entries(tile.span, self.first, self.vectors.shape[1]).expand_as(tile.scores)

    def spread(self, per_offset: Tensor, tile: Tile) -> None:
        tile.scores.copy_(per_offset.gather(-1, self._entries(tile)))

    def collect(self, tile: Tile, per_offset: Tensor) -> None:
        per_offset.scatter_add_(-1, self._entries(tile), tile.scores)

    def add_to(self, gradient: Tensor) -> None:
        gradient += self.sums


Bias: TypeAlias = GridBias | ListedBias | StridedGrid | WrittenOutGrid
Vectors: TypeAlias = GridVectors | ListedVectors
BiasReader: TypeAlias = GridReader | ListedReader | StridedGridReader | WrittenOutReader


def vectors_of_table(offsets: Grid | Listed, table: Tensor, first: int) -> Vectors:
    """Return a table of vectors in a piece's layout."""
    return GridVectors(offsets, table, first) if isinstance(offsets, Grid) else ListedVectors(offsets, table, first)


def bias_of_grids(problem: Problem, piece: Piece) -> Bias | None:
    """Return the table between the problem's grids in the form that suits a piece; None if there is none."""
    if problem.grid_bias is None:
        return None
    offsets = CellOffsets(*problem.grids)
    if problem.n_q * problem.n_k <= tuning.current().kept_scores:
        return WrittenOutGrid(offsets, problem.grid_bias, piece.queries, piece.keys)
    if len(piece.queries) == problem.n_q and len(piece.keys) == problem.n_k and not problem.limits_offsets:
        return StridedGrid(offsets, problem.grid_bias)
    queries, keys = offsets.positions(problem.value.device)
    listed = Listed(queries[piece.queries.start : piece.queries.stop], keys[piece.keys.start : piece.keys.stop])
    return ListedBias(listed, problem.grid_bias, offsets.first)


class Tables:
    """The tables of a problem in the layout of one piece."""

    def __init__(self, problem: Problem, piece: Piece) -> None:
        value = problem.value
        tables = problem.bias, problem.grid_bias
        self._bias_forbids = any(table is not None and bool(table.isneginf().any()) for table in tables)
        self._limited = problem.limits_offsets
        offsets = layout(piece.query_positions, piece.key_positions, value.device)
        self.layout = offsets
        self.bias: Bias | None = None
        self.key_table, self.value_table = (
            None if table is None else vectors_of_table(offsets, table, first)
            for table, first in zip((problem.key_table, problem.value_table), problem.first[1:], strict=True)
        )
        self.reach: range | None = None
        """The allowed m, if the layout is a grid."""
        if isinstance(offsets, Grid):
            self.reach = offsets.reach(problem.min_offset, problem.max_offset)
            if problem.bias is not None or problem.limits_offsets:
                nothing = value.new_zeros(1, 1, dtype=problem.dtype).expand(problem.heads, -1)
                table = nothing if problem.bias is None else problem.bias
                self.bias = GridBias(offsets, table, problem.first[0], self.reach)
        elif problem.bias is not None:
            self.bias = ListedBias(offsets, problem.bias, problem.first[0])
        self.grid_bias = bias_of_grids(problem, piece)

    @property
    def step(self) -> int:
        """The number of columns by which diagonals move from row to row in the memory that tables read and write."""
        return self.layout.step if isinstance(self.layout, Grid) else 0

    def may_leave_nothing(self, queries: range) -> bool:
        """Whether causality, the window or a bias may leave some of these queries without a key."""
        if self._bias_forbids or not self._limited or not isinstance(self.layout, Grid) or self.reach is None:
            return self._bias_forbids or self._limited
        # If the first and the last query have keys, then so have those between.
        return not all(self.layout.keys_of(range(row, row + 1), self.reach) for row in (queries[0], queries[-1]))

    def by_name(self) -> dict[str, Bias | Vectors]:
        """Return the tables by their names in ``GRADIENTS``."""
        vectors = {"key_table": self.key_table, "value_table": self.value_table}
        return {**self.biases(), **{name: table for name, table in vectors.items() if table is not None}}

    def biases(self) -> dict[str, Bias]:
        """Return the tables of one number per head and offset by their names in ``GRADIENTS``."""
        tables = {"bias": self.bias, "grid_bias": self.grid_bias}
        return {name: table for name, table in tables.items() if table is not None}

    def vectors(self) -> tuple[Vectors | None, Vectors | None]:
        """The tables of the keys and of the values."""
        return self.key_table, self.value_table

    def of_rows(self, queries: range) -> tuple[Vectors | None, Vectors | None]:
        """Return the parts of both tables of vectors that some queries can read."""
        key_table, value_table = (None if table is None else table.of_rows(queries) for table in self.vectors())
        return key_table, value_table
