"""Learned absolute position embeddings (Devlin et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention.terms import PositionsLike
from .base import ModelShape, Position, table_rows


class Learned(Position):
    """Adds one trained vector per position to the token embeddings.

    Args:
        std: standard deviation of the initial vectors; BERT's is that of its token embeddings.
    Shape:
        weight: (max_length, embedding_size), drawn from a normal cut at two standard deviations.
    Extrapolation: none; a position from max_length on raises :class:`PositionRangeError`.
    Source: Devlin et al. (2019), arXiv 1810.04805; google-research/bert ``embedding_postprocessor``.
    """

    def __init__(self, model: ModelShape, *, std: float = 0.02) -> None:
        super().__init__(model)
        if std < 0:
            raise ValueError(f"std: expected at least 0, got {std}")
        self.std = std
        self.weight = nn.Parameter(torch.empty(model.max_length, model.embedding_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.std == 0:
            nn.init.zeros_(self.weight)  # trunc_normal_ would divide by it
        else:
            nn.init.trunc_normal_(self.weight, std=self.std, a=-2 * self.std, b=2 * self.std)

    def embed(self, hidden: Tensor, positions: PositionsLike) -> Tensor:
        rows = table_rows(positions, len(self.weight), "learned", hidden.device)
        return hidden + self.weight[rows].to(hidden.dtype)
