"""Relative attention of Transformer-XL (Dai et al. 2019) and Funnel-Transformer (Dai et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from ..kernels.terms import (
    FactorPair,
    OffsetBias,
    OffsetKeys,
    Positions,
    Term,
    offset_range,
    offset_step,
    position_values,
)
from .base import ModelShape, Position, check_choice, float_dtype
from .site import Site
from .tables import remembered

FORMS = ("shifted", "factorized")


class Window(NamedTuple):
    """The offsets between affine sequences, ``first``, ``first + step``, ..., and their sinusoids (T, hidden_size).

    The kernels are those of each layer, taken apart at once: the gradient of a part has the size of the whole.
    """

    first: int
    step: int
    waves: Tensor
    kernels: Sequence[Tensor]


class TransformerXL(Position):
    """Adds the query's product with a projected sinusoid of the distance, and two trained biases to the query.

    ``score_ij = scale * (<q_i + u, k_j> + <q_i + w, R(i - j) W>)`` with ``R(d) = [sin(d f), cos(d f)]``,
    ``f_k = 10000 ** (-2 k / hidden_size)``, and u, w, W per layer, shared where layers are.

    The second product is a table over offsets (``OffsetKeys``): "shifted", because Transformer-XL's relative shift
    reads such a table. By the addition theorem it is also a product of features of rank hidden_size, "factorized" in
    Funnel's code. That form gives the same numbers at a higher cost; fractional and explicit positions need it.

    Args:
        form: "shifted" or "factorized".
        reset_cls: remove position from [CLS]'s row and column (positions at or below 0), as Funnel-Transformer does; by
            default True if [CLS] is kept apart from pooling.
        dropout: dropout probability of the sinusoids in training; all layers share one mask.
    Shape (with L distinct layers):
        content_bias, position_bias: (L, num_heads, head_dim), u and w. kernel: (L, hidden_size, num_heads * head_dim),
            W. All are normal with standard deviation ``initializer_range``, cut at two of them.
    Extrapolation: any length and any real position.
    Source: Dai et al. (2019), arXiv 1901.02860, Section 3.3; Dai et al. (2020), arXiv 2006.03236, and its code.
    """

    paper, year = "Dai et al.", 2019
    acts_on = frozenset({"scores"})
    shift_invariant = True
    needs_content = True

    def __init__(
        self, model: ModelShape, *, form: str = "shifted", reset_cls: bool | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__(model)
        check_choice("form", form, FORMS)
        if model.hidden_size % 2:
            raise InputError("hidden_size", f"transformer_xl needs an even one, got {model.hidden_size}")
        if not 0.0 <= dropout < 1.0:
            raise InputError("dropout", f"expected a number in [0, 1), got {dropout}")
        self.form = form
        self.reset_cls = model.separate_cls if reset_cls is None else reset_cls
        self.dropout = nn.Dropout(dropout)
        layers, heads = max(model.passes) + 1, (model.num_heads, model.head_dim)
        self.content_bias = nn.Parameter(torch.empty(layers, *heads))
        self.position_bias = nn.Parameter(torch.empty(layers, *heads))
        self.kernel = nn.Parameter(torch.empty(layers, model.hidden_size, model.num_heads * model.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.model.initializer_range
        for parameter in (self.content_bias, self.position_bias, self.kernel):
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)

    def prepare_for(self, site: Site) -> Window | None:
        if self.form == "factorized":
            return None
        queries, keys = site.queries, site.keys
        span = offset_range(queries, keys)
        if span is None:
            return None
        assert isinstance(queries, Positions)
        assert isinstance(keys, Positions)
        (first, last), step = span, offset_step(queries, keys) or 1
        device = self.kernel.device
        waves = remembered(
            self,
            "waves",
            (*span, step),
            lambda: self._waves(-torch.arange(first, last + 1, step, device=device)),
            self._like,
        )
        return Window(first, step, self.dropout(waves), self.kernel.unbind())

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        return query + self._bias(self.content_bias, site.layer, query), key, value

    def content_terms(self, query: Tensor, key: Tensor, site: Site) -> tuple[Term, ...]:
        window = self.shared_at(site)
        if window is None:
            return (self._factorized(query, site),)
        compute = partial(self._tables, window, self.model.passes[site.layer], self.content_scale(site))
        if self.training and self.dropout.p:
            vectors, table = compute()
        else:
            key = window.first, window.step, len(window.waves), self.content_scale(site)
            sources = self.kernel, self.content_bias, self.position_bias
            vectors, table = remembered(self, site.layer, key, compute, *sources)
        terms = OffsetKeys(vectors, window.first, window.step), OffsetBias(table, window.first, window.step)
        return (*terms, *self._without_cls(query, site, vectors, window)) if self.reset_cls else terms

    def _tables(self, window: Window, layer: int, scale: float) -> tuple[Tensor, Tensor]:
        """Return what the query of a distinct layer meets at each offset: vectors (heads, T, head_dim), and scaled
        numbers (heads, T)."""
        projected = functional.linear(window.waves, window.kernels[layer].mT)
        vectors = projected.unflatten(-1, (self.model.num_heads, -1)).transpose(0, 1).contiguous()
        vectors = vectors.to(float_dtype(vectors))
        # The query has u added already.
        more = (self.position_bias[layer] - self.content_bias[layer]).to(vectors.dtype)
        return vectors, torch.linalg.vecdot(vectors, more.unsqueeze(1)) * scale

    def _bias(self, biases: Tensor, layer: int, like: Tensor) -> Tensor:
        return biases[self.model.passes[layer]].unsqueeze(1).to(like.dtype)

    def _waves(self, distances: Tensor) -> Tensor:
        """Return R at distances (...): (..., hidden_size) in the parameters' dtype."""
        half = self.model.hidden_size // 2
        pair = torch.arange(half, dtype=torch.float64, device=distances.device)
        angles = distances.to(torch.float64).unsqueeze(-1) * 10_000.0 ** (-pair / half)
        return torch.cat((angles.sin(), angles.cos()), -1).to(self.kernel.dtype)

    def _without_cls(self, query: Tensor, site: Site, vectors: Tensor, window: Window) -> tuple[Term, ...]:
        """Return the terms that remove position from [CLS]'s row and column again, of rank one each."""
        query_positions, key_positions = site.queries, site.keys
        assert isinstance(query_positions, Positions)
        assert isinstance(key_positions, Positions)
        terms: list[Term] = []
        query_is_cls, key_is_cls = (
            (positions.values(query.device) <= 0).to(query.dtype) for positions in (query_positions, key_positions)
        )
        scale = self.content_scale(site)
        bias = self._bias(self.position_bias, site.layer, query)

        if key_positions.length and key_positions.start <= 0:
            offsets = key_positions.start - query_positions.values(query.device)
            rows = (offsets - window.first) // window.step
            column = vectors.index_select(1, rows).to(query.dtype)  # (heads, n_q, head_dim)
            # Not computed from query + bias, which would have to be kept for the backward.
            wrong = torch.linalg.vecdot(query, column) + (bias * column).sum(-1)
            wrong = wrong * (query_is_cls - 1) * scale
            terms.append(FactorPair(wrong.unsqueeze(-1), key_is_cls[:, None].expand(1, query.shape[1], -1, 1)))
        if query_positions.length and query_positions.start <= 0:
            first = (key_positions.start - query_positions.start - window.first) // window.step
            every = max(1, key_positions.stride // window.step)  # a single key's may be shorter than a step
            row = vectors[:, first::every][:, : key_positions.length].to(query.dtype)  # (heads, n_k, head_dim)
            wrong = torch.einsum("bhd,hkd->bhk", query[:, :, 0] + bias.squeeze(1), row) * -scale
            terms.append(FactorPair(query_is_cls[:, None].expand(1, query.shape[1], -1, 1), wrong.unsqueeze(-1)))
        return tuple(terms)

    def _factorized(self, query: Tensor, site: Site) -> FactorPair:
        """Return scale * <query_i + w, R(i - j) W>, by the addition theorem, for query (batch, heads, n_q,
        head_dim)."""
        query = (query + self._bias(self.position_bias, site.layer, query)) * self.content_scale(site)
        kernel = self.kernel[self.model.passes[site.layer]].unflatten(-1, (self.model.num_heads, -1)).transpose(0, 1)
        to_sin, to_cos = (query @ kernel.mT.to(query.dtype)).chunk(2, -1)  # (batch, heads, n_q, hidden_size / 2)
        values = [torch.atleast_2d(position_values(positions, query.device)) for positions in (site.queries, site.keys)]
        (sin, cos), (key_sin, key_cos) = (self._waves(at).unsqueeze(1).to(query.dtype).chunk(2, -1) for at in values)
        query_factors = torch.cat((to_sin * sin + to_cos * cos, to_cos * sin - to_sin * cos), -1)
        key_factors = torch.cat((key_cos, key_sin), -1)
        if self.reset_cls:
            others = [(at > 0)[:, None, :, None].to(query.dtype) for at in values]
            query_factors, key_factors = query_factors * others[0], key_factors * others[1]
        return FactorPair(query_factors, key_factors.expand(-1, query.shape[1], -1, -1))
