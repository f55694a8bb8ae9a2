"""Inkling's relative positions: a few trained profiles over the distance, which every token mixes again (2026)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.terms import OffsetKeys, Term
from .base import ModelShape, PositionMethod, check_min, float_dtype, offset_span
from .logn import inkling_growth
from .site import Site
from .visible_keys import count_visible_keys


class Inkling(PositionMethod):
    """Adds a bias by distance that each token mixes from a few trained profiles, in every layer.

    ``score_ij += <r_i, profiles[:, i - j]>`` for ``0 <= i - j < extent``, and 0 beyond, with ``r_i = R x_i`` for every
    head from the layer's input x. So one token can look at its neighbor, and another at a full sentence. A rank of 16
    is enough for long profiles. The bias is not scaled. The method was made for causal models. In an encoder,
    profiles reach to both sides.

    Args:
        rank: the number of profiles.
        extent: the first distance at which the bias is 0. (Inkling: 1024, and the size of the window in layers with a
            window.)
        log_scaling: a number of keys. A query that sees n keys, more than this number, and its bias are multiplied by
            ``1 + alpha log(n / log_scaling)``. (``logn`` with "inkling" multiplies only the query.) If None, they are
            never multiplied, as in Inkling's layers with a window.
        alpha: the growth of ``log_scaling``.
    Shape (with L distinct layers, and D distances: ``extent``, or ``2 * extent - 1`` unless the model is causal):
        mix: (L, num_heads * rank, hidden_size), R. profiles: (L, rank, D), over the distance, or over query - key from
            1 - extent on. Both are normal with standard deviation ``initializer_range``.
    Extrapolation: any length; the bias of far keys is 0.
    Source: Inkling (Thinking Machines, 2026), ``InklingRelativeLogits`` and ``InklingAttention`` in transformers. Its
        queries and keys have norms, a scale of 1 / head_dim and short convolutions, which this class does not have.
    """

    paper, year = "Thinking Machines", 2026
    acts_on = frozenset({"scores"})
    accepts_fractional = False
    shift_invariant = True
    rotates_any_heads = True

    def __init__(
        self,
        model: ModelShape,
        *,
        rank: int = 16,
        extent: int = 512,
        log_scaling: int | None = None,
        alpha: float = 0.1,
    ) -> None:
        super().__init__(model)
        check_min(1, rank=rank, extent=extent, log_scaling=log_scaling)
        check_min(0, alpha=alpha)
        self.rank, self.extent, self.log_scaling, self.alpha = rank, extent, log_scaling, alpha
        # Only a factor on the query needs a query, and all keys, which it counts.
        self.needs_query_key = self.reads_keys = self.scales_query = log_scaling is not None
        layers = max(model.layer_of_pass) + 1
        distances = extent if model.causal else 2 * extent - 1
        self.one_sided = model.causal
        self.mix = nn.Parameter(torch.empty(layers, model.num_heads * rank, model.hidden_size))
        self.profiles = nn.Parameter(torch.empty(layers, rank, distances))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.mix, self.profiles):
            nn.init.normal_(parameter, 0.0, self.model.initializer_range)

    def compute_shared(self, site: Site) -> tuple[int, int]:
        """Return the first and the last offset of the tables.

        Raises:
            TypeError: for fractional positions.
        """
        span = offset_span(site.query_positions, site.key_positions, self.extent)
        if span is None:
            raise TypeError("inkling: needs integer positions, got fractional ones")
        return span

    def query_factor(self, query: Tensor, site: Site) -> Tensor:
        """Return the factor on each query's products, (1 or batch, 1, n_q, 1), for the query or its profile factors."""
        assert self.log_scaling is not None
        n = count_visible_keys(site, causal=self.model.causal, device=query.device).to(float_dtype(query))
        return inkling_growth(n, self.log_scaling, self.alpha)[:, None, :, None]

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        self.check_hidden(hidden)
        first, last = self.get_shared(site)
        layer = self.model.layer_of_pass[site.layer]
        factors = functional.linear(hidden, self.mix[layer]).unflatten(-1, (self.model.num_heads, -1)).transpose(1, 2)
        if self.scales_query:
            factors = (factors * self.query_factor(factors, site)).to(factors.dtype)
        # Offsets ascend: far keys to the left come first, keys to the right last. The zeros at both ends are for the
        # offsets beyond.
        profiles = functional.pad(self.profiles[layer].flip(-1), (1, self.extent if self.model.causal else 1))
        table = profiles[:, first + self.extent : last + self.extent + 1].mT
        return (OffsetKeys(table.unsqueeze(0), first, 1, factors),)
