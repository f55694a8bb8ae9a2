"""``GridMethod``: where the tokens of an image are."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.terms import PositionsLike
from .base import MOST_POSITIONS, ModelShape, Position, table_rows


class GridMethod(Position):
    """A method for images: position p is cell ``p - prefix`` of a grid, row by row.

    Positions below ``prefix`` are tokens without a place on the grid.

    Args:
        rows: the rows of the grid; by default as many as ``max_length`` tokens need.
        columns: the columns of the grid; by default those of a square.
        prefix: the tokens before the grid, such as [CLS].
    """

    extrapolates = False
    fractional = False
    name: ClassVar[str]
    """The method's name in messages."""

    def __init__(self, model: ModelShape, *, rows: int | None, columns: int | None, prefix: int) -> None:
        super().__init__(model)
        if prefix < 0:
            raise InputError("prefix", f"expected at least 0, got {prefix}")
        for field, side in (("rows", rows), ("columns", columns)):
            if side is not None and side < 1:
                raise InputError(field, f"expected at least 1, got {side}")
        rows, columns = (None if side is None else int(side) for side in (rows, columns))
        prefix = int(prefix)
        cells = max(1, model.max_length - prefix)
        if columns is None:
            columns = math.isqrt(cells - 1) + 1 if rows is None else -(-cells // rows)
        self.length = model.max_length if rows is None else prefix + rows * columns
        self._sized_by = "max_length" if rows is None else "prefix + rows * columns"
        self.rows, self.columns, self.prefix = -(-cells // columns) if rows is None else rows, columns, prefix
        if self.rows * self.columns > MOST_POSITIONS:
            raise InputError("rows", f"expected at most {MOST_POSITIONS} cells, got {self.rows} x {self.columns}")

    def cells(self, positions: PositionsLike, device: torch.device) -> Tensor:
        """Return the cell of each position, (n,) or (batch, n), below 0 for the prefix; raise for a position beyond."""
        return table_rows(positions, self.length, self.name, device, self._sized_by) - self.prefix
