"""ALiBi: a fixed penalty per head that grows linearly with the distance (Press et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ModelShape, OffsetFunction, float_dtype


def slopes(num_heads: int) -> list[float]:
    """Return the authors' slopes: a geometric sequence. Beyond a power of two, every second slope of the next power
    follows."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return first + [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]


class Alibi(OffsetFunction):
    """Subtracts ``slope * |offset|`` from the scores, with a fixed slope per head; nothing is trained.

    In a causal model this is the authors' ``slope * offset``. In an encoder the penalty is the same on both sides, so
    this method cannot distinguish left from right.

    Extrapolation: any length and any real offset; the method was made for this.
    Source: Press, Smith & Lewis (2022), arXiv 2108.12409, Section 3.
    """

    paper, year = "Press et al.", 2022
    shares_curve = True

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.slopes = slopes(model.num_heads)

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        distance = torch.as_tensor(offsets).abs()
        distance = distance.to(torch.promote_types(distance.dtype, float_dtype(self._like)))
        slope = torch.tensor(self.slopes, dtype=distance.dtype, device=distance.device)
        return -slope.view(-1, *[1] * distance.dim()) * distance
