"""Sandwich: the product of two sinusoidal position vectors as a bias (Chi et al. 2022).

whereformer compare --positions sandwich,alibi,kerple --plugin examples/methods/sandwich.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whereformer.errors import InputError
from whereformer.positions import ModelShape, OffsetFunction, register
from whereformer.positions.base import as_offsets, float_dtype


class Sandwich(OffsetFunction):
    """Adds the product of the two positions' sinusoids to the scores, with a fixed factor per head.

    ``score_ij += sum_m cos(offset * w_m) / ratio_h`` with ``w_m = 10000 ** (-2 m / width)`` for m below width / 2, and
    ``ratio_h = 8 h / num_heads`` for head h from 1. The sum falls about as a logarithm of the distance, with small
    waves. Nothing is trained. The formula was made for causal models. In an encoder, distances to the left and to the
    right look alike.

    Args:
        width: the number of features of the sinusoids, even.
    Extrapolation: any length and any real offset; the method was made for this.
    Source: Chi et al. (2022), arXiv 2212.10356, Section 6.
    """

    paper, year = "Chi et al.", 2022
    shares_curve = True

    def __init__(self, model: ModelShape, *, width: int = 128) -> None:
        super().__init__(model)
        if width < 2 or width % 2:
            raise InputError("width", f"expected an even number of at least 2, got {width}")
        self.width = width

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        offsets = as_offsets(offsets, self._like)
        device = offsets.device
        # MPS has no float64, and float32 angles drift.
        exact = offsets.to("cpu" if device.type == "mps" else device).to(torch.float64)
        sum_of_waves = torch.zeros_like(exact)
        for pair in range(self.width // 2):  # one at a time: explicit positions have an offset for each pair of tokens
            sum_of_waves = sum_of_waves + (exact * 10_000.0 ** (-2 * pair / self.width)).cos()
        heads = self.model.num_heads
        ratios = torch.arange(1, heads + 1, dtype=torch.float64, device=exact.device) * 8 / heads
        curve = sum_of_waves / ratios.view(-1, *[1] * exact.dim())
        return curve.to(device, torch.promote_types(offsets.dtype, float_dtype(self._like)))


register("sandwich", Sandwich)
