"""KERPLE: a trained penalty that grows with the logarithm or a power of the distance (Chi et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checks import check_choice
from .base import ModelShape, OffsetFunction, as_offsets, float_dtype

VARIANTS = ("log", "power")


class Kerple(OffsetFunction):
    """Subtracts a trained function of the distance from the scores, per head and layer: a logarithm or a power.

    ``score_ij -= r1 * log(1 + r2 * |offset|)`` for "log", and ``score_ij -= r1 * |offset| ** r2`` for "power", with r1
    and r2 above 0 and, for "power", r2 at most 2. The formula was made for causal models. In an encoder, distances to
    the left and to the right look alike.

    Args:
        variant: "log", which the authors recommend for long text, or "power"; ALiBi is the power 1 with fixed factors.
    Shape:
        r1, r2: (num_layers, num_heads), uniform: r1 in [0, 2) and r2 in [0, 1) for "log", the other way around for
            "power". The formula uses their absolute values, and 2 for a larger power; the authors clip the parameters
            themselves, at 0.01 and 2.
    Extrapolation: any length and any real offset; the method was made for this.
    Source: Chi et al. (2022), arXiv 2205.09921, Section 4. Their code calls r1 and r2 bias_p and bias_a for "log",
        bias_a and bias_p for "power".
    """

    paper, year = "Chi et al.", 2022

    def __init__(self, model: ModelShape, *, variant: str = "log") -> None:
        super().__init__(model)
        check_choice("variant", variant, VARIANTS)
        self.variant = variant
        self.r1 = nn.Parameter(torch.empty(model.num_layers, model.num_heads))
        self.r2 = nn.Parameter(torch.empty(model.num_layers, model.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r1_bound, r2_bound = (2.0, 1.0) if self.variant == "log" else (1.0, 2.0)
        nn.init.uniform_(self.r1, 0.0, r1_bound)
        nn.init.uniform_(self.r2, 0.0, r2_bound)

    def curve_sources(self) -> tuple[Tensor, ...]:
        return self.r1, self.r2

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        return self._penalty(offsets, self.r1[layer], self.r2[layer])

    def curve_per_layer(self, offsets: Tensor) -> Sequence[Tensor]:
        return self._penalty(offsets, self.r1, self.r2).unbind()

    def _penalty(self, offsets: Tensor | Sequence[float], *parameters: Tensor) -> Tensor:
        """Return the curves (..., heads, offsets) of parameters r1 and r2, each of shape (..., heads)."""
        dtype = float_dtype(self.r1)
        distance = as_offsets(offsets, self.r1).to(dtype).abs()
        r1, r2 = (parameter.to(dtype).abs()[(..., *[None] * distance.dim())] for parameter in parameters)
        if self.variant == "log":
            return -r1 * torch.log1p(r2 * distance)
        # Clip the power but not its gradient, so that a power beyond 2 can come back.
        return -r1 * distance ** (r2 - (r2 - 2.0).clamp(min=0.0).detach())
