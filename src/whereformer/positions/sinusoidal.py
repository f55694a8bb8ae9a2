"""Sinusoidal position vectors added to the embeddings (Vaswani et al. 2017, Section 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import check_choice
from ..errors import InputError
from ..kernels.terms import PositionsLike, position_values
from .base import ModelShape, PositionMethod

LAYOUTS = ("interleaved", "blocks")


class Sinusoidal(PositionMethod):
    """Adds a fixed vector of sines and cosines of the position to the (scaled) token embeddings.

    There are two layouts. Their frequencies differ, so no permutation turns one into the other; ``width`` is the
    embedding size:

    - "interleaved", the paper: sines in even, cosines in odd columns, frequency ``(M / m) ** (-2 i / width) / m``.
    - "blocks", the authors' tensor2tensor and fairseq: all sines, then all cosines, frequency
      ``m * (M / m) ** (-i / (width // 2 - 1))``, and a zero column if the width is odd. (The authors multiply by m
      where the paper's formula divides; this matters only if m is not 1.)

    As in the paper, token embeddings are multiplied by ``sqrt(width)`` before the vector is added; encoders read that
    factor from ``embedding_scale``.

    Args:
        layout: "interleaved" or "blocks".
        min_timescale: m, the shortest wavelength divided by 2 pi, in tokens.
        max_timescale: M, the longest wavelength divided by 2 pi, in tokens.
    Extrapolation: any length and any real position.
    Source: Vaswani et al. (2017), arXiv 1706.03762; tensor2tensor ``get_timing_signal_1d``.
    """

    paper, year = "Vaswani et al.", 2017

    def __init__(
        self,
        model: ModelShape,
        *,
        layout: str = "interleaved",
        min_timescale: float = 1.0,
        max_timescale: float = 10_000.0,
    ) -> None:
        super().__init__(model)
        check_choice("layout", layout, LAYOUTS)
        if layout == "interleaved" and model.embedding_size % 2:
            raise InputError("layout", f"'interleaved' needs an even embedding size, got {model.embedding_size}")
        if not 0 < min_timescale < max_timescale:
            values = f"{min_timescale} and {max_timescale}"
            raise InputError("min_timescale", f"expected 0 < min_timescale < max_timescale, got {values}")
        self.layout = layout
        self.min_timescale = min_timescale
        self.max_timescale = max_timescale
        self.embedding_scale = math.sqrt(model.embedding_size)

    def vectors(self, positions: PositionsLike, device: torch.device | str | None = None) -> Tensor:
        """Return the vectors in float64, as :meth:`PositionMethod.vectors` describes."""
        width, half = self.model.embedding_size, self.model.embedding_size // 2
        ratio = math.log(self.max_timescale / self.min_timescale)
        # Angles in float64: in float32 their error grows with the position.
        index = torch.arange(half, dtype=torch.float64, device=device)
        if self.layout == "interleaved":
            frequencies = torch.exp(-ratio * 2 * index / width) / self.min_timescale
        else:
            frequencies = torch.exp(-ratio * index / max(half - 1, 1)) * self.min_timescale
        angles = position_values(positions, device).to(torch.float64).unsqueeze(-1) * frequencies
        if self.layout == "interleaved":
            return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)
        return functional.pad(torch.cat((angles.sin(), angles.cos()), -1), (0, width % 2))

    def embed(self, hidden: Tensor, positions: PositionsLike) -> Tensor:
        return hidden + self.vectors(positions, hidden.device).to(hidden.dtype)
