"""PoPE: positions as angles and words as lengths, in polar coordinates (Gopalakrishnan et al. 2025)."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import FactorPair, PositionsLike, Term
from .base import ModelShape, Place, Position
from .rope import cosines_and_sines

Waves: TypeAlias = tuple[Tensor, Tensor]
"""Cosine and sine of every feature's angle, (n, head_dim) or (batch, 1, n, head_dim) each."""


def _softplus(features: Tensor) -> Tensor:
    # Compilers take the layout of torch's own softplus' gradient for another one (torch 2.13).
    return torch.logaddexp(features, features.new_zeros(()))


class Pope(Position):
    """Makes every feature of query and key a complex number: the word gives its length, the position its angle.

    ``score_ij = scale * sum_c softplus(q_ic) softplus(k_jc) cos((j - i) theta_c + phase_c)`` with
    ``theta_c = base ** (-c / head_dim)``. In RoPE the angle between two features comes from the words, too, so that
    what matches also decides where it matches; here words and positions are apart. Every feature turns, where RoPE
    turns pairs.

    A product of complex numbers is one of their real parts and one of their imaginary parts. Attention computes the
    first as query . key, and the second is a term of rank head_dim, so scores take about twice the time.

    Args:
        base: sets the longest wavelength.
    Shape:
        phase: (num_layers, num_heads, head_dim), angles that are added to the keys', at first 0. Values outside of -2
            pi to 0 act as the nearest end; their gradient is that of the end, so that they can come back.
    Extrapolation: any length and any real position.
    Source: Gopalakrishnan et al. (2025), arXiv 2509.10534; x-transformers' ``PolarEmbedding``, where values that are
        cut have no gradient.
    """

    paper, year = "Gopalakrishnan et al.", 2025
    acts_on = frozenset({"queries", "keys"})
    shift_invariant = True
    needs_content = True
    reads_keys = True
    shares_heads = False

    def __init__(self, model: ModelShape, *, base: float = 10_000.0) -> None:
        super().__init__(model)
        if base <= 0:
            raise InputError("base", f"expected a positive number, got {base}")
        self.base = base
        self.phase = nn.Parameter(torch.empty(model.num_layers, model.num_heads, model.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.phase)

    def prepare_for(self, queries: PositionsLike, keys: PositionsLike, prepared: None = None) -> tuple[Waves, Waves]:
        """Cosines and sines of the positions' angles, for queries and for keys, in float64."""
        of_queries = self._waves(queries)
        return of_queries, of_queries if keys is queries else self._waves(keys)

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        of_query, of_key = self._of_layer(place)
        return _softplus(query) * of_query[0].to(query), _softplus(key) * of_key[0].to(key), value

    def content_terms(self, query: Tensor, key: Tensor, place: Place) -> tuple[Term, ...]:
        of_query, of_key = self._of_layer(place)
        query_factors = _softplus(query) * of_query[1].to(query) * self.content_scale(place)
        return (FactorPair(query_factors, _softplus(key) * of_key[1].to(key)),)

    def _waves(self, positions: PositionsLike) -> Waves:
        device = positions.device if isinstance(positions, Tensor) else self._like.device
        features = self.model.head_dim

        def frequencies(device: torch.device) -> Tensor:
            return self.base ** (-torch.arange(features, dtype=torch.float64, device=device) / features)

        return cosines_and_sines(positions, frequencies, device)

    def _of_layer(self, place: Place) -> tuple[Waves, Waves]:
        """Return the waves of queries, and those of keys with the layer's phases."""
        of_queries, (cos, sin) = self.prepared_at(place)
        given = self.phase[place.layer]
        # Cut without cutting the gradient.
        # Cut without cutting the gradient. ONNX takes no whole number as a bound of float values.
        phase = given + (given.clamp(-2 * math.pi, 0.0) - given).detach()
        phase = phase.unsqueeze(1).to(cos)
        return of_queries, (cos * phase.cos() - sin * phase.sin(), sin * phase.cos() + cos * phase.sin())
