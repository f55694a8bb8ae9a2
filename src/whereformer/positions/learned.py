"""Learned absolute position embeddings (Devlin et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.terms import PositionsLike
from .base import ModelShape, PositionMethod, table_rows


class Learned(PositionMethod):
    """Adds one trained vector per position to the token embeddings.

    Shape:
        weight: (max_length, embedding_size), drawn like the model's own weights: from a normal distribution with
            standard deviation ``initializer_range``, truncated at two standard deviations.
    Extrapolation: none; positions of max_length and above raise :class:`PositionRangeError`.
    Source: Devlin et al. (2019), arXiv 1810.04805; google-research/bert ``embedding_postprocessor``.
    """

    paper, year = "Devlin et al.", 2019
    extrapolates = False
    accepts_fractional = False

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.weight = nn.Parameter(torch.empty(model.max_length, model.embedding_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.model.initializer_range
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def vectors(self, positions: PositionsLike, device: torch.device | str | None = None) -> Tensor:
        return self.weight[table_rows(positions, len(self.weight), "learned", self.weight.device)].to(device)

    def embed(self, hidden: Tensor, positions: PositionsLike) -> Tensor:
        return hidden + self.vectors(positions, hidden.device).to(hidden.dtype)
