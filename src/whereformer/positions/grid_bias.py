"""A trained number per head and offset of two cells, as in Swin Transformer and BEiT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import ModelShape
from .grids import GridFunction


class GridBias(GridFunction):
    """Adds one trained number per head and offset in rows and columns to the scores; for images.

    This is the relative position bias of Swin Transformer and of BEiT, over a whole image or a window.

    Args:
        rows: the rows of the grid; by default as many as ``max_length`` tokens need.
        columns: the columns of the grid; by default those of a square.
        prefix: the tokens before the grid, such as [CLS]. Pairs with one of them get three trained numbers per head, as
            in BEiT.
        share_layers: use one table for all layers instead of one per layer.
    Shape:
        weight: (layers, num_heads, 2 * rows - 1, 2 * columns - 1), over key - query. Drawn like the model's own
            weights: from a normal distribution with standard deviation ``initializer_range``, cut at two of them.
        prefix_bias: (layers, num_heads, 3), zeros; none without a prefix.
    Extrapolation: none; positions beyond the grid raise :class:`PositionRangeError`.
    Source: Liu et al. (2021), arXiv 2103.14030, eq. 4; Bao et al. (2022), arXiv 2106.08254. Their tables are over
        query - key.
    """

    paper, year = "Liu et al. 2021; Bao et al.", 2022
    name = "grid_bias"

    def __init__(
        self,
        model: ModelShape,
        *,
        rows: int | None = None,
        columns: int | None = None,
        prefix: int = 0,
        share_layers: bool = False,
    ) -> None:
        super().__init__(model, rows=rows, columns=columns, prefix=prefix, share_layers=share_layers)
        size = (self.num_sets, model.num_heads, 2 * self.rows - 1, 2 * self.columns - 1)
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        std = self.model.initializer_range
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def surface(self, *, layer: int = 0) -> Tensor:
        return self.weight[self.own_set(layer)]
