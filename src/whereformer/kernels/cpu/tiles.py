"""Tiles of the score matrix: some of its rows at a time, in memory that is used again.

Where ``offset`` is affine in query and key, a tile's diagonals have one offset each. In memory with room between its
rows, read again with a row pitch that is longer by one, diagonals are columns: a table's gradient is one sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .workspace import Workspace


@dataclass(frozen=True)
class Span:
    """A tile's queries and keys, as index ranges of its piece."""

    queries: range
    keys: range


@dataclass(frozen=True)
class Tile:
    """A view of memory: ``scores`` (groups, rows, columns).

    ``skewed`` is the same memory read so that a diagonal is a column: (groups, rows, columns + step * (rows - 1)).
    What it shows beside the tile's own entries is margin.
    """

    span: Span
    scores: Tensor
    skewed: Tensor
    margins: tuple[Tensor, ...]

    def clear_margins(self) -> None:
        """Make the margins zero again after a write through ``skewed``."""
        for margin in self.margins:
            margin.zero_()


class Scratch:
    """Memory for one tile at a time, used again and again.

    Args:
        workspace: where the memory comes from.
        groups, rows, columns: the largest tile.
        step: by how many columns a diagonal moves from row to row; 0 if ``skewed`` is not needed: tiles are contiguous.
    """

    def __init__(
        self, workspace: Workspace, groups: int, rows: int, columns: int, step: int, dtype: torch.dtype
    ) -> None:
        self.step = step
        self.margin = step * (rows - 1)
        self.pitch = columns + self.margin
        # Products with the transposed tile lose a third of their speed if rows lie a power of two apart.
        if self.margin and groups == 1:
            self.pitch += 16 if self.pitch % 256 else 32
        self.memory = workspace.take((groups * rows * self.pitch + 2 * self.margin,), dtype)
        self.size = (0, 0, 0)

    def tile(self, groups: int, span: Span) -> Tile:
        """The tile of a span, over whatever the memory held before; margins are zero."""
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
            # The margin right of a row is the margin left of the next one.
            (
                self.memory[: self.margin],
                self.memory.as_strided((groups, rows, pitch - columns), strides, start + columns),
            ),
        )


def chunks(whole: range, size: int) -> list[range]:
    """A range cut into nearly equal parts of at most ``size``."""
    count = max(1, -(-len(whole) // size))
    ends = [len(whole) * part // count for part in range(count + 1)]
    return [whole[start:stop] for start, stop in pairwise(ends)]
