"""FIRE: a bias that a small network computes from the relative distance (Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from ..kernels.precision import without_autocast
from ..kernels.terms import DenseBias, Term, offsets_between, position_values
from .base import ModelShape, PositionMethod, as_offsets, check_min, float_dtype
from .site import Site


class Fire(PositionMethod):
    """Adds a small network's value at (log distance / log query position) to the scores, per head and layer.

    ``score_ij += mlp(log(|c offset| + 1) / (log(|c max(i, L)|  + 1) + eps))`` for the query at position i (eq. 19
    with the authors' absolute values). Up to the trained threshold L, the score depends only on the distance. Beyond
    it, distances are measured relative to i, so no input ever leaves the trained range, and a shift of all positions
    changes the scores. The formula was made for causal models. In an encoder, distances to the left and to the right
    look alike.

    Because of the division by a function of i, every pair of query and key has its own number: a DenseBias with
    O(n_q n_k) memory.

    Args:
        width: hidden units of the network.
        initial_threshold: L at the start; 512 in the paper.
    Shape:
        scale (c), threshold (L as a multiple of initial_threshold): (num_layers,), 0.1 and 1 at the start;
        hidden_weight, hidden_bias: (num_layers, width); out_weight: (num_layers, num_heads, width); out_bias:
        (num_layers, num_heads); drawn as ``torch.nn.Linear`` does.
    Extrapolation: any length and any real position.
    Source: Li et al. (2023), arXiv 2310.04418.
    """

    paper, year = "Li et al.", 2023

    def __init__(self, model: ModelShape, *, width: int = 32, initial_threshold: float = 512.0) -> None:
        super().__init__(model)
        check_min(1, width=width)
        if initial_threshold <= 0:
            raise InputError("initial_threshold", f"expected a positive number, got {initial_threshold}")
        layers = model.num_layers
        self.initial_threshold = initial_threshold
        self.scale = nn.Parameter(torch.empty(layers))
        self.threshold = nn.Parameter(torch.empty(layers))
        self.hidden_weight = nn.Parameter(torch.empty(layers, width))
        self.hidden_bias = nn.Parameter(torch.empty(layers, width))
        self.out_weight = nn.Parameter(torch.empty(layers, model.num_heads, width))
        self.out_bias = nn.Parameter(torch.empty(layers, model.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.1)
        nn.init.constant_(self.threshold, 1.0)
        for parameter in (self.hidden_weight, self.hidden_bias):
            nn.init.uniform_(parameter, -1.0, 1.0)
        bound = self.out_weight.shape[-1] ** -0.5
        for parameter in (self.out_weight, self.out_bias):
            nn.init.uniform_(parameter, -bound, bound)

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        query_values = position_values(site.query_positions, hidden.device)
        offsets = offsets_between(query_values, position_values(site.key_positions, hidden.device))
        scores = self._scores(offsets, query_values.unsqueeze(-1), site.layer)  # (..., n_q, n_k, heads)
        return (DenseBias(scores.movedim(-1, -3) if offsets.dim() == 3 else scores.movedim(-1, 0).unsqueeze(0)),)

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        """Return the bias at each offset for a query at or before the threshold, (heads, offsets)."""
        values = as_offsets(offsets, self.scale)
        return self._scores(values, torch.zeros_like(values), layer).movedim(-1, 0)

    def _scores(self, offsets: Tensor, query_positions: Tensor, layer: int) -> Tensor:
        """Evaluate the network at each offset, (..., num_heads)."""
        dtype = float_dtype(self.scale)
        scale, threshold = self.scale[layer].to(dtype), self.threshold[layer].to(dtype) * self.initial_threshold
        # Autocast would round the distances to half precision, and far distances would be equal.
        with without_autocast(offsets.device):
            distance = torch.log1p((scale * offsets.to(dtype)).abs())
            max_distance = torch.maximum(query_positions.to(dtype), threshold.abs())
            relative = distance / (torch.log1p((scale * max_distance).abs()) + 1e-6)
            hidden = torch.relu(
                relative.unsqueeze(-1) * self.hidden_weight[layer].to(dtype) + self.hidden_bias[layer].to(dtype)
            )
            return functional.linear(hidden, self.out_weight[layer].to(dtype), self.out_bias[layer].to(dtype))
