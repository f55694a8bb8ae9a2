"""Relative position representations in keys and values (Shaw et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import OffsetKeys, OffsetValues, Term
from .base import ModelShape, Place, Position


class Shaw(Position):
    """A trained vector per clipped offset, added to the keys and to the values that a query sees.

    ``score_ij = scale * <query_i, key_j + keys[r]>`` and ``out_i = sum_j weight_ij (value_j + values[r])`` with
    ``r = clip(offset, -clip, clip)`` (equations 3 and 4). Separate in every layer.

    Args:
        clip: the largest distance with a vector of its own, in tokens; 0 leaves one vector for all offsets.
        keys: whether keys have vectors.
        values: whether values have vectors.
        per_head: whether every head has vectors of its own, as in the paper's base model; otherwise heads share them,
            as in its big model and in tensor2tensor.
    Shape:
        keys, values: (num_layers, 2 * clip + 1, head_dim), row ``offset + clip``; Glorot uniform. With ``per_head``
            (num_layers, num_heads, 2 * clip + 1, head_dim).
    Extrapolation: any length; every distance beyond ``clip`` looks alike.
    When joined with rope, the vectors meet the rotated query, so what they add also depends on the query's position.
    Source: Shaw et al. (2018), arXiv 1803.02155; tensor2tensor ``dot_product_attention_relative``.
    """

    paper, year = "Shaw et al.", 2018
    acts_on = frozenset({"scores", "values"})
    fractional = False
    shift_invariant = True

    def __init__(
        self, model: ModelShape, *, clip: int = 16, keys: bool = True, values: bool = True, per_head: bool = False
    ) -> None:
        super().__init__(model)
        if clip < 0:
            raise InputError("clip", f"expected a distance of at least 0, got {clip}")
        if not (keys or values):
            raise InputError("keys", "expected keys or values to be True, got False for both")
        self.clip = clip
        self.needs_content = keys
        heads = (model.num_heads,) if per_head else ()
        size = (model.num_layers, *heads, 2 * clip + 1, model.head_dim)
        self.keys = nn.Parameter(torch.empty(size)) if keys else None
        self.values = nn.Parameter(torch.empty(size)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = (6 / (2 * self.clip + 1 + self.model.head_dim)) ** 0.5
        for table in (self.keys, self.values):
            if table is not None:
                nn.init.uniform_(table, -bound, bound)

    def terms(self, hidden: Tensor, place: Place) -> tuple[Term, ...]:
        terms: tuple[Term, ...] = ()
        if self.keys is not None:
            terms += (OffsetKeys(self._by_head(self.keys[place.layer]), -self.clip),)
        if self.values is not None:
            terms += (OffsetValues(self._by_head(self.values[place.layer]), -self.clip),)
        return terms

    @staticmethod
    def _by_head(table: Tensor) -> Tensor:
        """Return a layer's vectors with a heads axis, (heads or 1, 2 * clip + 1, head_dim)."""
        return table if table.dim() == 3 else table.unsqueeze(0)
