"""Relative position representations in keys and values (Shaw et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import OffsetKeys, OffsetValues, Term
from .base import ModelShape, PositionMethod, check_min
from .site import Site


class Shaw(PositionMethod):
    """Adds a trained vector per clipped offset to the keys and to the values that a query sees.

    ``score_ij = scale * <query_i, key_j + keys[r]>`` and ``out_i = sum_j weight_ij (value_j + values[r])`` with
    ``r = clip(offset, -clip, clip)`` (equations 3 and 4). Every layer has separate vectors.

    Args:
        clip: the largest distance with a separate vector, in tokens; 0 means one vector for all offsets.
        keys: whether keys have vectors.
        values: whether values have vectors.
        per_head: whether every head has separate vectors, as in the paper's base model; otherwise heads share them, as
            in its big model and in tensor2tensor.
    Shape:
        keys, values: (num_layers, 2 * clip + 1, head_dim), row ``offset + clip``; Glorot uniform. With ``per_head``
            (num_layers, num_heads, 2 * clip + 1, head_dim).
    Extrapolation: any length; all distances beyond ``clip`` share a vector.
    When joined with rope, the vectors are multiplied by the rotated query, so the scores also depend on the query's
    position.
    Source: Shaw et al. (2018), arXiv 1803.02155; tensor2tensor ``dot_product_attention_relative``.
    """

    paper, year = "Shaw et al.", 2018
    acts_on = frozenset({"scores", "values"})
    accepts_fractional = False
    shift_invariant = True

    def __init__(
        self, model: ModelShape, *, clip: int = 16, keys: bool = True, values: bool = True, per_head: bool = False
    ) -> None:
        super().__init__(model)
        check_min(0, clip=clip)
        if not (keys or values):
            raise InputError("keys", "expected keys or values to be True, got False for both")
        self.clip = clip
        self.needs_query_key = keys
        self.acts_on = frozenset(name for name, used in (("scores", keys), ("values", values)) if used)
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

    def compute_shared(self, site: Site) -> list[tuple[Tensor, ...] | None]:
        """Return the vectors of every layer, of keys and of values; each table is split at once, in one operation."""
        return [
            None if table is None else (table if table.dim() == 4 else table.unsqueeze(1)).unbind()
            for table in (self.keys, self.values)
        ]

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        kinds = zip((OffsetKeys, OffsetValues), self.get_shared(site), strict=True)
        return tuple(term(vectors[site.layer], -self.clip) for term, vectors in kinds if vectors is not None)
