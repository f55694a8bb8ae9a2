"""TISA over two dimensions: Gaussian kernels over offsets in rows and columns, for images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError
from .base import ModelShape, float_dtype
from .grids import GridFunction


class Tisa2d(GridFunction):
    """Adds a sum of round Gaussian kernels of the offset in rows and columns to the scores, per head; for images.

    A kernel adds ``amplitude * exp(-|sharpness| * ((row offset - row) ** 2 + (column offset - column) ** 2))``, where
    (row, column) is its center. The kernels, and their initial values, are those of TISA's authors, for text. That the
    squared distance is one in two dimensions, that kernels are round, and the three numbers of the prefix are ours.

    Args:
        rows: the rows of the grid; by default as many as ``max_length`` tokens need.
        columns: the columns of the grid; by default those of a square.
        prefix: the tokens before the grid, such as [CLS]. Pairs with one of them get three trained numbers per head.
        num_kernels: Gaussians per head; 0 means no position information.
        share_layers: use one set of kernels for all layers instead of one set per layer.
    Shape:
        amplitude, sharpness: (layers, num_heads, num_kernels); ``sharpness`` in tokens ** -2. Both drawn from N(0.1,
            0.01 ** 2).
        center: (layers, num_heads, num_kernels, 2), row and column, in tokens. Drawn from N(0, 5 ** 2).
        prefix_bias: (layers, num_heads, 3), zeros; none without a prefix.
    Extrapolation: the parameters fit any grid; a model's grid is fixed when it is built.
    Source: ours, after Wennberg & Henter (2021), arXiv 2106.01950, eq. 5.
    """

    paper, year = "ours, after Wennberg & Henter", 2021
    name = "tisa2d"

    def __init__(
        self,
        model: ModelShape,
        *,
        rows: int | None = None,
        columns: int | None = None,
        prefix: int = 0,
        num_kernels: int = 5,
        share_layers: bool = False,
    ) -> None:
        super().__init__(model, rows=rows, columns=columns, prefix=prefix, share_layers=share_layers)
        if num_kernels < 0:
            raise InputError("num_kernels", f"expected at least 0, got {num_kernels}")
        size = (self.num_sets, model.num_heads, num_kernels)
        self.amplitude = nn.Parameter(torch.empty(size))
        self.sharpness = nn.Parameter(torch.empty(size))
        self.center = nn.Parameter(torch.empty(*size, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.amplitude, 0.1, 0.01)
        nn.init.normal_(self.sharpness, 0.1, 0.01)
        nn.init.normal_(self.center, 0.0, 5.0)

    def kernel_parameters(self) -> tuple[nn.Parameter, ...]:
        return self.amplitude, self.sharpness, self.center

    def surface(self, *, layer: int = 0) -> Tensor:
        own, dtype = self.own_set(layer), float_dtype(self.amplitude)
        amplitude, sharpness, center = (
            kernels[own].to(dtype) for kernels in (self.amplitude, self.sharpness, self.center)
        )
        # A round kernel is a product of one over rows and one over columns: (num_heads, offsets, num_kernels) each.
        by_row, by_column = (
            torch.exp(
                -sharpness.abs().unsqueeze(1)
                * (torch.arange(1 - side, side, dtype=dtype, device=center.device)[:, None] - center[:, None, :, axis])
                ** 2
            )
            for axis, side in enumerate((self.rows, self.columns))
        )
        # Not a matrix product, whose factors autocast would round.
        return ((by_row * amplitude.unsqueeze(1)).unsqueeze(2) * by_column.unsqueeze(1)).sum(-1)
