"""Enformer's relative positions: projected features of the distance in three families (Avsec et al. 2021).

whereformer compare --positions enformer,transformer_xl --plugin examples/methods/enformer.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from whereformer import OffsetBias, OffsetKeys, Site
from whereformer.errors import InputError
from whereformer.positions import ModelShape, Position, register
from whereformer.positions.base import offset_span

SMALLEST_HALF_LIFE = 3.0
"""The binary logarithm of the shortest half-life of the exponentials."""


def features(offsets: Tensor, count: int, length: int) -> Tensor:
    """Return the features of whole offsets (T,), (T, 6 count) float64.

    With F for ``count`` and L for ``length``, these are ``2 ** (-|d| / half_life)`` with F half-lives from 8 to L,
    ``|d| < 2 ** f - 1`` for f = 1 .. F, and F gamma densities with means from L / F to L and the standard deviation
    L / (2 F), each divided by its peak. The same times the sign of the offset follow.
    """
    distance = offsets.to(torch.float64).abs().unsqueeze(-1)

    def evenly(first: float, last: float) -> Tensor:
        return torch.linspace(first, last, count, dtype=torch.float64, device=offsets.device)

    half_lives = 2.0 ** evenly(SMALLEST_HALF_LIFE, math.log2(length))
    exponential = 2.0 ** (-distance / half_lives)
    widths = 2.0 ** torch.arange(1, count + 1, dtype=torch.float64, device=offsets.device) - 1
    central = (distance < widths).to(torch.float64)

    deviation, step = length / (2 * count), (length - length / count) / max(1, count - 1)
    means = [length / count + index * step for index in range(count)]
    # ONNX has no logarithm of the gamma function, so these numbers are constants there.
    logarithms_of_gamma = [math.lgamma((mean / deviation) ** 2) for mean in means]
    mean, of_shape = torch.tensor([means, logarithms_of_gamma], dtype=torch.float64, device=offsets.device)
    shape, rate = (mean / deviation) ** 2, mean / deviation**2

    def density(at: Tensor) -> Tensor:
        logarithm = torch.xlogy(shape - 1, at) - rate * at - of_shape + shape * rate.log()
        return logarithm.exp() + 1e-8

    # The largest value at a whole distance below L is beside the density's mode.
    mode = (shape - 1).clamp(min=0) / rate
    peak = torch.maximum(*(density(at.clamp(max=length - 1)) for at in (mode.floor(), mode.ceil())))
    found = torch.cat((exponential, central, density(distance) / peak), -1)
    return torch.cat((found, offsets.sign().unsqueeze(-1) * found), -1)


class Window(NamedTuple):
    """What all layers share: the features (T, num_features) of the offsets from ``first`` on."""

    first: int
    features: Tensor


class Enformer(Position):
    """Adds the query's product with projected features of the offset, and two trained biases to the query.

    ``score_ij = scale * (<q_i + u, k_j> + <q_i + w, R(j - i) W>)``, as in Transformer-XL, where R are sinusoids. Here
    they are exponentials, central masks and gamma densities of the distance, and the same times the sign of the offset
    (:func:`features`). They were made for DNA, where near and far matter.

    Args:
        num_features: the length of R, a multiple of 6; by default the largest that is at most head_dim, as the authors
            have it. None: the default.
        length: the distance that the features are made for; ``max_length`` if None. The authors take the length of the
            sequence, which is the same in all of theirs.
    Shape (with L distinct layers):
        content_bias, position_bias: (L, num_heads, head_dim), u and w; theirs are ours times ``scale``. kernel: (L,
            num_features, num_heads * head_dim), W. All are normal with standard deviation ``initializer_range``, cut at
            two of them.
    Extrapolation: any length; every distance from ``length - 1`` on looks alike.
    Source: Avsec et al. (2021), doi 10.1038/s41592-021-01252-x, and its code (``positional_features_all``).
    """

    paper, year = "Avsec et al.", 2021
    acts_on = frozenset({"scores"})
    fractional = False
    shift_invariant = True
    needs_content = True

    def __init__(self, model: ModelShape, *, num_features: int | None = None, length: int | None = None) -> None:
        num_features = max(6, model.head_dim // 6 * 6) if num_features is None else num_features
        if num_features < 6 or num_features % 6:
            raise InputError("num_features", f"expected a multiple of 6, got {num_features}")
        super().__init__(model)
        self.num_features, self.length = num_features, model.max_length if length is None else length
        if self.length < 1:
            raise InputError("length", f"expected at least 1, got {self.length}")
        layers, heads = max(model.passes) + 1, (model.num_heads, model.head_dim)
        self.content_bias = nn.Parameter(torch.empty(layers, *heads))
        self.position_bias = nn.Parameter(torch.empty(layers, *heads))
        self.kernel = nn.Parameter(torch.empty(layers, num_features, model.num_heads * model.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the biases and the projections."""
        std = self.model.initializer_range
        for parameter in (self.content_bias, self.position_bias, self.kernel):
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)

    def prepare_for(self, site: Site, prepared: None = None) -> Window:
        """Return the features of the offsets that may occur.

        Raises:
            TypeError: for fractional positions.
        """
        span = offset_span(site.queries, site.keys, self.length - 1)
        if span is None:
            raise TypeError("enformer: needs whole positions, got fractional ones")
        first, last = span
        device = self.kernel.device
        exact = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        found = features(torch.arange(first, last + 1, device=exact), self.num_features // 6, self.length)
        return Window(first, found.to(device, self.kernel.dtype))

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        """Add u to the query."""
        return query + self.content_bias[self.model.passes[site.layer]].unsqueeze(1).to(query.dtype), key, value

    def terms(self, hidden: Tensor, site: Site) -> tuple[OffsetKeys, OffsetBias]:
        """Return the product of R W with the query, which has u added already, and with w - u."""
        window: Window = self.shared_at(site)
        own = self.model.passes[site.layer]
        projected = functional.linear(window.features, self.kernel[own].mT)
        vectors = projected.unflatten(-1, (self.model.num_heads, -1)).transpose(0, 1)  # (heads, T, head_dim)
        more = (self.position_bias - self.content_bias)[own].unsqueeze(-1)
        table = (vectors @ more.to(vectors.dtype)).squeeze(-1) * self.content_scale(site)
        return OffsetKeys(vectors, window.first), OffsetBias(table, window.first)


register("enformer", Enformer)
