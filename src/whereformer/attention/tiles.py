"""Tiles of the score matrix: small pieces of it, one after another in the same memory.

Rows of a tile are in *reverse* order, the last query first. Then a table laid out over offsets becomes a tile by
strides alone (a Hankel matrix: row r column c reads entry r + c), and the diagonals of a tile, read again with a row
pitch that is shorter by one, are columns: a table's gradient is one sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """A tile's queries and keys, as index ranges of its piece."""

    queries: range
    keys: range


@dataclass(frozen=True)
class Tile:
    """A view of scratch memory: ``scores`` (groups, rows, columns), rows reversed.

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
    """Memory for one tile at a time, used again and again: fresh memory would cost more than the arithmetic.

    Args:
        groups, rows, columns: the largest tile.
        step: by how many columns a diagonal moves from row to row; 0 if ``skewed`` is not needed.
        take: makes memory of a size.
        dense: whether tiles are contiguous, which oneDNN multiplies fastest; only where ``step`` is 0.
    """

    def __init__(
        self, groups: int, rows: int, columns: int, step: int, take: Callable[[tuple[int, ...]], Tensor], dense: bool
    ) -> None:
        self.step = step
        self.dense = dense and step == 0
        self.margin = step * (rows - 1)
        self.pitch = columns + self.margin
        # MKL's products with the transposed tile lose a third of their speed if rows lie a power of two apart.
        if groups == 1 and not self.dense:
            self.pitch += 16 if self.pitch % 256 else 32
        self.memory = take((groups * rows * self.pitch + self.margin,))
        if self.margin:
            self.memory.zero_()
        self.size = (groups, rows, columns)

    @classmethod
    def for_spans(
        cls,
        groups: int,
        row_spans: list[tuple[range, list[Span]]],
        step: int,
        take: Callable[[tuple[int, ...]], Tensor],
        dense: bool,
    ) -> Scratch:
        """Memory for the largest of the tiles."""
        spans = [span for _, some in row_spans for span in some]
        rows = max((len(span.queries) for span in spans), default=1)
        return cls(groups, rows, max((len(span.keys) for span in spans), default=1), step, take, dense)

    def tile(self, groups: int, span: Span) -> Tile:
        """The tile of a span, over whatever the memory held before; margins are zero."""
        rows, columns = len(span.queries), len(span.keys)
        if self.margin and self.size != (groups, rows, columns):
            self.memory.zero_()
            self.size = (groups, rows, columns)
        pitch = columns if self.dense else self.pitch
        strides = (rows * pitch, pitch, 1)
        shift = self.step * (rows - 1)
        return Tile(
            span,
            self.memory.as_strided((groups, rows, columns), strides, self.margin),
            self.memory.as_strided((groups, rows, columns + shift), (strides[0], pitch - self.step, 1), self.margin),
            # The margin right of a row is the margin left of the next one.
            (
                self.memory[: self.margin],
                self.memory.as_strided((groups, rows, pitch - columns), strides, self.margin + columns),
            ),
        )
