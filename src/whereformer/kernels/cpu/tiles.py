"""Tiles of the score matrix, a few rows at a time, in memory that is reused.

If ``offset`` is affine in query and key, every diagonal of a tile has one offset. The memory has room between its rows.
Read with a row pitch that is longer by one, diagonals become columns, so a table's gradient is one sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .workspace import Workspace


@dataclass(frozen=True)
class Span:
    """A tile's queries and keys, as index ranges within its piece."""

    queries: range
    keys: range


@dataclass(frozen=True)
class Tile:
    """A view of memory: ``scores`` (groups, rows, columns).

    ``skewed`` is the same memory read so that a diagonal is a column: (groups, rows, columns + step * (rows - 1)).
    Entries of it that are not the tile's own are margin.
    """

    span: Span
    scores: Tensor
    skewed: Tensor
    margins: tuple[Tensor, ...]

    def clear_margins(self) -> None:
        """Set the margins back to zero after a write through ``skewed``."""
        for margin in self.margins:
            margin.zero_()


class Scratch:
    """Memory for one tile at a time, reused for every tile.

    Args:
        workspace: where the memory comes from.
        groups, rows, columns: the size of the largest tile.
        step: the number of columns by which a diagonal moves from row to row; 0 for contiguous tiles without
            ``skewed``.
    """

    def __init__(
        self, workspace: Workspace, groups: int, rows: int, columns: int, step: int, dtype: torch.dtype
    ) -> None:
        self.step = step
        self.margin = step * (rows - 1)
        self.pitch = columns + self.margin
        # Products with the transposed tile are a third slower if the distance between rows is a power of two.
        if self.margin and groups == 1:
            self.pitch += 16 if self.pitch % 256 else 32
        self.memory = workspace.take((groups * rows * self.pitch + 2 * self.margin,), dtype)
        self.size = (0, 0, 0)

    def tile(self, groups: int, span: Span) -> Tile:
        """Return the tile of a span. Its entries are whatever the memory held before; its margins are zero."""
        rows, columns = len(span.queries), len(span.keys)
        if self.margin and (self.size[:2] != (groups, rows) or columns < self.size[2]):
            self.memory.zero_()
        self.size = (groups, rows, columns)
        pitch = self.pitch if self.margin else columns
        strides = (rows * pitch, pitch, 1)
        shift = self.step * (rows - 1)
        start = self.memory.storage_offset() + self.margin
        return Tile(
            span,
            self.memory.as_strided((groups, rows, columns), strides, start),
            self.memory.as_strided((groups, rows, columns + shift), (strides[0], pitch + self.step, 1), start - shift),
            # The margin to the right of a row is the margin to the left of the next one.
            (
                self.memory[: self.margin],
                self.memory.as_strided((groups, rows, pitch - columns), strides, start + columns),
            ),
        )


def chunks(whole: range, size: int) -> list[range]:
    """Cut a range into nearly equal parts of at most ``size``."""
    count = max(1, -(-len(whole) // size))
    ends = [len(whole) * part // count for part in range(count + 1)]
    return [whole[start:stop] for start, stop in pairwise(ends)]
