"""What methods for images share: ``GridMethod``, where tokens are, and ``GridFunction``, a number per offset."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import DenseBias, GridPositions, OffsetBias2d, Positions, PositionsLike, Term, offsets_between
from ..kernels.tracing import are_numbers
from .base import MOST_POSITIONS, ModelShape, Place, Position, table_rows


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


class GridFunction(GridMethod):
    """A method whose whole effect on a score is one number per head and offset of two cells of a grid: its ``surface``.

    Args:
        rows, columns, prefix: those of :class:`GridMethod`. Pairs with a token of the prefix get three trained numbers
            per head.
        share_layers: whether all layers have the same parameters.
    Shape:
        prefix_bias: (layers, num_heads, 3), zeros; None without a prefix. The three numbers are those of
            :class:`~whereformer.OffsetBias2d`.
    """

    def __init__(
        self, model: ModelShape, *, rows: int | None, columns: int | None, prefix: int, share_layers: bool
    ) -> None:
        super().__init__(model, rows=rows, columns=columns, prefix=prefix)
        self.share_layers = share_layers
        self.num_sets = 1 if share_layers else model.num_layers
        size = (self.num_sets, model.num_heads, 3)
        self.prefix_bias = nn.Parameter(torch.empty(size)) if prefix else None

    def reset_parameters(self) -> None:
        if self.prefix_bias is not None:
            nn.init.zeros_(self.prefix_bias)

    def surface(self, *, layer: int = 0) -> Tensor:
        """What each head adds to a score at each offset, (num_heads, 2 * rows - 1, 2 * columns - 1).

        The offsets of rows go from ``1 - rows`` to ``rows - 1``, and those of columns alike.
        """
        raise NotImplementedError

    def own_set(self, layer: int) -> int:
        """The index of a layer's parameters."""
        return 0 if self.share_layers else layer

    def terms(self, hidden: Tensor, place: Place) -> tuple[Term, ...]:
        device = self._like.device
        cells = [self.cells(positions, device) for positions in (place.queries, place.keys)]
        queries, keys = (self._grid(positions) for positions in (place.queries, place.keys))
        surface = self.surface(layer=place.layer)
        prefix = None if self.prefix_bias is None else self.prefix_bias[self.own_set(place.layer)]
        if queries is not None and keys is not None:
            return (OffsetBias2d(surface, (1 - self.rows, 1 - self.columns), queries, keys, prefix),)
        scores = self._scores(surface, prefix, *cells)
        return (DenseBias(scores.transpose(0, 1) if scores.dim() == 4 else scores.unsqueeze(0)),)

    def _scores(self, surface: Tensor, prefix: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor:
        """Return what is added to each pair of cells, (num_heads, n_q, n_k) or (num_heads, batch, n_q, n_k)."""
        on_grid = queries.clamp(min=0), keys.clamp(min=0)
        rows = offsets_between(*(cells // self.columns for cells in on_grid)) + self.rows - 1
        columns = offsets_between(*(cells % self.columns for cells in on_grid)) + self.columns - 1
        scores = surface[:, rows, columns]
        if prefix is None:
            return scores
        from_prefix, to_prefix, within = prefix.to(scores.dtype).view(-1, 3, *[1] * rows.dim()).unbind(1)
        query_before, key_before = (queries < 0).unsqueeze(-1), (keys < 0).unsqueeze(-2)
        scores = torch.where(query_before, from_prefix, scores)
        return torch.where(key_before, torch.where(query_before, within, to_prefix), scores)

    def _grid(self, positions: PositionsLike) -> GridPositions | None:
        """Return positions as the prefix and the first rows of the grid; None if they are not."""
        if not isinstance(positions, Positions) or not are_numbers(positions.start, positions.length):
            return None
        rows, rest = divmod(positions.length - self.prefix, self.columns)
        if rest or rows < 1 or (positions.start, positions.stride) != (0, 1):
            return None
        return GridPositions(rows, self.columns, self.prefix)
