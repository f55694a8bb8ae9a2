"""FoX: forget gates of the tokens between query and key lower the score (Lin et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.precision import without_autocast
from ..kernels.terms import DistanceDecay, Term
from .base import ModelShape, PositionMethod, float_dtype
from .site import Site
from .visible_keys import prefix_sums


class Fox(PositionMethod):
    """Subtracts the forget gates of the tokens between query and key, one trained gate per token and head.

    ``score_ij -= |c_i - c_j|`` with ``c_i = sum of log sigmoid(<g_h, k_t> + b_h)`` over the keys up to position i of
    the same document. k_t are the keys of all heads of token t. In a causal model this is the paper's formula: weights
    of earlier keys are multiplied by the gates of all tokens after them, up to the query. In an encoder, the same holds
    for tokens to the right.

    The authors compute gates from the layer's input x_t, this class from the keys, because a key-value cache, pooled
    queries and attention to another sequence have keys, but not that input. Keys are ``W x_t``, so the authors' gate
    with weights w equals the gate with ``g = w W^-1`` of this class, if the keys of all heads together are as wide as
    x_t and have neither bias nor norm.

    Shape:
        weight: (num_layers, num_heads, num_heads * head_dim), g, normal with standard deviation ``initializer_range``.
        bias: (num_layers, num_heads), b, zeros.
    Extrapolation: any length and any real position; only the order of positions matters.
    Source: Lin et al. (2025), arXiv 2503.02130, eq. 4.
    """

    paper, year = "Lin et al.", 2025
    shift_invariant = True
    needs_query_key = True
    reads_keys = True

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.weight = nn.Parameter(torch.empty(model.num_layers, model.num_heads, model.num_heads * model.head_dim))
        self.bias = nn.Parameter(torch.empty(model.num_layers, model.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, self.model.initializer_range)
        nn.init.zeros_(self.bias)

    def content_terms(self, query: Tensor, key: Tensor, site: Site) -> tuple[Term, ...]:
        dtype = float_dtype(key)
        # In half precision, small gates would vanish in long sums.
        with without_autocast(key.device):
            weight, bias = (parameter[site.layer].to(dtype) for parameter in (self.weight, self.bias))
            gates = functional.linear(key.transpose(1, 2).flatten(2).to(dtype), weight, bias)
            query_levels, key_levels = prefix_sums(site, functional.logsigmoid(gates).mT)
        return (DistanceDecay(query_levels, key_levels),)
