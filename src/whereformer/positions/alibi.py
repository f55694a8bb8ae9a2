"""ALiBi: a fixed penalty per head that grows linearly with the distance (Press et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .base import ModelShape, OffsetFunction, float_dtype


def slopes(num_heads: int) -> list[float]:
    """Return the authors' slopes: a geometric sequence; past a power of two, every other slope of the next power's."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return first + [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]


class Alibi(OffsetFunction):
    """Subtracts ``slope * |offset|`` from the scores, with a fixed slope per head; nothing is trained.

    In a causal model this is the authors' ``slope * offset``. In an encoder the penalty is the same on both sides, so
    this method alone cannot tell left from right.

    Args:
        learned: train a factor of each head's slope, as data2vec 2.0 does for speech; all layers share them. What
            counts is the factor's absolute value, where their code cuts it at 0.
    Shape:
        scale: (num_heads,), ones; None unless ``learned``.
    Extrapolation: any length and any real offset; this is what the method was made for.
    Source: Press, Smith & Lewis (2022), arXiv 2108.12409, Section 3; for ``learned``, Baevski et al. (2022), arXiv
        2212.07525, and its code (``learned_alibi_scale_per_head``).
    """

    paper, year = "Press et al.", 2022
    one_curve = True

    def __init__(self, model: ModelShape, *, learned: bool = False) -> None:
        super().__init__(model)
        self.slopes = slopes(model.num_heads)
        self.scale = nn.Parameter(torch.empty(model.num_heads)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scale is not None:
            nn.init.ones_(self.scale)

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        distance = torch.as_tensor(offsets, device=None if self.scale is None else self.scale.device).abs()
        dtype = float_dtype(self._like if self.scale is None else self.scale)
        distance = distance.to(torch.promote_types(distance.dtype, dtype))
        slope = torch.tensor(self.slopes, dtype=distance.dtype, device=distance.device)
        if self.scale is not None:
            slope = slope * self.scale.to(slope.dtype).abs()
        return -slope.view(-1, *[1] * distance.dim()) * distance
