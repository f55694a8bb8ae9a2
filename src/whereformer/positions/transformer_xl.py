"""Relative attention of Transformer-XL (Dai et al. 2019) and Funnel-Transformer (Dai et al. 2020)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checks import check_choice
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
from .base import ModelShape, PositionMethod, float_dtype
from .site import Site
from .tables import Layers, Sources, split_layers

FORMS = ("shifted", "factorized")


class Window(NamedTuple):
    """The offsets between affine sequences, and the layers' parameters, which all layers share.

    Args:
        first, step: the offsets are ``first``, ``first + step``, ...
        waves: the sinusoids of the offsets, (T, hidden_size).
        query_is_cls, key_is_cls: 1 for [CLS], else 0, (1, 1, n, 1).
        kernels: the kernel of each distinct layer.
        content_biases, position_biases: the biases of each distinct layer, (heads, 1, head_dim).
        sources: all parameters; None if dropout changes the waves.
    """

    first: int
    step: int
    waves: Tensor
    query_is_cls: Tensor
    key_is_cls: Tensor
    kernels: Layers
    content_biases: Layers
    position_biases: Layers
    sources: Sources | None


class Tables(NamedTuple):
    """A layer's tables over offsets, and the tables that remove position from the column and row of [CLS] again.

    Args:
        vectors: the vectors that are multiplied by the query at each offset, (heads, T, head_dim).
        numbers: the numbers that are added at each offset, scaled, (heads, T).
        column: None if no key is [CLS]; otherwise, for [CLS] as a key, the vectors that are multiplied by each query
            except [CLS], (heads, n_q, head_dim); the numbers that are added, (heads, n_q); and the key factor,
            (1, heads, n_k, 1).
        row: None if no query is [CLS]; otherwise, for [CLS] as a query, the vectors that it is multiplied by at each
            key, (heads, head_dim, n_k), and the query factor, (1, heads, n_q, 1).
    """

    vectors: Tensor
    numbers: Tensor
    column: tuple[Tensor, Tensor, Tensor] | None
    row: tuple[Tensor, Tensor] | None


class TransformerXL(PositionMethod):
    """Adds the query's product with a projected sinusoid of the distance, and two trained biases to the query.

    ``score_ij = scale * (<q_i + u, k_j> + <q_i + w, R(i - j) W>)`` with ``R(d) = [sin(d f), cos(d f)]``,
    ``f_k = 10000 ** (-2 k / hidden_size)``, and u, w, W per layer, shared where layers are.

    The second product is a table over offsets (``OffsetKeys``): "shifted", because Transformer-XL's relative shift
    reads such a table. By the addition theorem it is also a product of features of rank hidden_size, "factorized" in
    Funnel's code. That form computes the same numbers at a higher cost; fractional and explicit positions need it. If a
    joined method changes the query (rope), the second product uses the query before this change.

    Args:
        form: "shifted" or "factorized".
        reset_cls: remove position from [CLS]'s row and column (positions at or below 0), as Funnel-Transformer does; by
            default True if [CLS] is not pooled. Then a shift of all positions changes the scores.
        dropout: dropout probability of the sinusoids in training; all layers share one mask.
    Shape (with L distinct layers):
        content_bias, position_bias: (L, num_heads, head_dim), u and w. kernel: (L, hidden_size, num_heads * head_dim),
            W. All are normal with standard deviation ``initializer_range``, truncated at two standard deviations.
    Extrapolation: any length and any real position.
    Source: Dai et al. (2019), arXiv 1901.02860, Section 3.3; Dai et al. (2020), arXiv 2006.03236, and its code.
    """

    paper, year = "Dai et al.", 2019
    acts_on = frozenset({"scores"})
    needs_query_key = True

    def __init__(
        self, model: ModelShape, *, form: str = "shifted", reset_cls: bool | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__(model)
        check_choice("form", form, FORMS)
        if model.hidden_size % 2:
            raise InputError("hidden_size", f"transformer_xl needs an even number, got {model.hidden_size}")
        if not 0.0 <= dropout < 1.0:
            raise InputError("dropout", f"expected a number in [0, 1), got {dropout}")
        self.form = form
        self.reset_cls = model.separate_cls if reset_cls is None else reset_cls
        self.shift_invariant = not self.reset_cls
        self.dropout = nn.Dropout(dropout)
        layers, heads = max(model.layer_of_pass) + 1, (model.num_heads, model.head_dim)
        self.content_bias = nn.Parameter(torch.empty(layers, *heads))
        self.position_bias = nn.Parameter(torch.empty(layers, *heads))
        self.kernel = nn.Parameter(torch.empty(layers, model.hidden_size, model.num_heads * model.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.model.initializer_range
        for parameter in (self.content_bias, self.position_bias, self.kernel):
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)

    def compute_shared(self, site: Site) -> Window | None:
        if self.form == "factorized" or offset_range(site.query_positions, site.key_positions) is None:
            return None
        positions = site.query_positions, site.key_positions
        constants = Sources(self, self._like).get_or_compute("shared", positions, partial(self._constants, site))
        first, step, waves, query_is_cls, key_is_cls = constants
        sources = None
        if not (self.training and self.dropout.p):
            sources = Sources(self, self.kernel, self.content_bias, self.position_bias)
        waves = self.dropout(waves) if self.training else waves
        kernels, content, position = map(
            split_layers, (self.kernel, self.content_bias.unsqueeze(2), self.position_bias.unsqueeze(2))
        )
        return Window(first, step, waves, query_is_cls, key_is_cls, kernels, content, position, sources)

    def _constants(self, site: Site) -> tuple[int, int, Tensor, Tensor, Tensor]:
        """Return the fields of a :class:`Window` that do not depend on parameters."""
        queries, keys = site.query_positions, site.key_positions
        assert isinstance(queries, Positions)
        assert isinstance(keys, Positions)
        (first, last), step = offset_range(queries, keys) or (0, 0), offset_step(queries, keys) or 1
        device = self.kernel.device
        waves = self._waves(-torch.arange(first, last + 1, step, device=device))
        query_is_cls, key_is_cls = (
            (positions.values(device) <= 0)[None, None, :, None].to(waves.dtype) for positions in (queries, keys)
        )
        return first, step, waves, query_is_cls, key_is_cls

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        if site.shared is None:
            bias = self._bias(self.content_bias, site.layer, query)
        else:
            bias = site.shared.content_biases[self.model.layer_of_pass[site.layer]].to(query.dtype)
        return query + bias, key, value

    def content_terms(self, query: Tensor, key: Tensor, site: Site) -> tuple[Term, ...]:
        window = self.get_shared(site)
        if window is None:
            return (self._factorized(query, site),)
        scale = self.content_scale(site)
        compute = partial(self._tables, window, site, scale, query.dtype)
        if window.sources is None:
            tables = compute()
        else:
            key_of_tables = site.query_positions, site.key_positions, scale, query.dtype
            tables = window.sources.get_or_compute(site.layer, key_of_tables, compute)
        first, step = window.first, window.step
        terms: tuple[Term, ...] = (OffsetKeys(tables.vectors, first, step), OffsetBias(tables.numbers, first, step))
        if self.others_change_query:
            factors = (query + self._bias(self.position_bias, site.layer, query)) * scale
            terms = (OffsetKeys(tables.vectors, first, step, factors),)
        cls_factors = []  # pairs of query factors and key factors, (batch, heads, n, 1)
        if tables.column is not None:
            vectors, numbers, key_is_cls = tables.column
            # w is in the numbers: the sum of query and w would have to be saved for the backward.
            correction = torch.linalg.vecdot(query, vectors) + numbers
            cls_factors.append((correction.unsqueeze(-1), key_is_cls.expand(query.shape[0], -1, -1, -1)))
        if tables.row is not None:
            vectors, query_is_cls = tables.row
            bias = window.position_biases[self.model.layer_of_pass[site.layer]].to(query.dtype)
            correction = torch.bmm(query.select(2, 0).transpose(0, 1) + bias, vectors).transpose(0, 1)
            cls_factors.append((query_is_cls.expand(query.shape[0], -1, -1, -1), correction.unsqueeze(-1)))
        if cls_factors:
            terms += (FactorPair(*(torch.cat(factors, -1) for factors in zip(*cls_factors, strict=True))),)
        return terms

    def _tables(self, window: Window, site: Site, scale: float, dtype: torch.dtype) -> Tables:
        """Return the tables of a layer for queries of this dtype."""
        queries, keys, layer = site.query_positions, site.key_positions, self.model.layer_of_pass[site.layer]
        assert isinstance(queries, Positions)
        assert isinstance(keys, Positions)
        projected = functional.linear(window.waves, window.kernels[layer].mT)
        vectors = projected.unflatten(-1, (self.model.num_heads, -1)).transpose(0, 1).contiguous()
        wide = vectors.to(float_dtype(vectors))
        bias = window.position_biases[layer].to(wide.dtype)
        # transform_qkv has added u to the query.
        bias_difference = bias - window.content_biases[layer].to(wide.dtype)
        numbers = torch.linalg.vecdot(wide, bias_difference) * scale
        query_is_cls, key_is_cls = (
            is_cls.expand(-1, self.model.num_heads, -1, -1).to(dtype)
            for is_cls in (window.query_is_cls, window.key_is_cls)
        )
        column = row = None
        if self.reset_cls and keys.length and keys.start <= 0:
            start, last = (
                (keys.start - query - window.first) // window.step for query in (queries.last, queries.start)
            )
            stride = max(1, queries.stride // window.step)
            # A slice, because the gradient of an index takes many times longer.
            correction = wide[:, start : last + 1 : stride].flip(1) * ((window.query_is_cls[0] - 1) * scale)
            column = correction.to(dtype), torch.linalg.vecdot(correction, bias).to(dtype), key_is_cls
        if self.reset_cls and queries.length and queries.start <= 0:
            first = (keys.start - queries.start - window.first) // window.step
            stride = max(1, keys.stride // window.step)  # a single key may have a stride below the step
            correction = wide[:, first::stride][:, : keys.length] * -scale
            row = correction.mT.to(dtype), query_is_cls
        return Tables(vectors, numbers, column, row)

    def _bias(self, biases: Tensor, layer: int, like: Tensor) -> Tensor:
        return biases[self.model.layer_of_pass[layer]].unsqueeze(1).to(like.dtype)

    def _waves(self, distances: Tensor) -> Tensor:
        """Return R at distances of any shape, (..., hidden_size), in the dtype of the parameters."""
        half = self.model.hidden_size // 2
        pair = torch.arange(half, dtype=torch.float64, device=distances.device)
        angles = distances.to(torch.float64).unsqueeze(-1) * 10_000.0 ** (-pair / half)
        return torch.cat((angles.sin(), angles.cos()), -1).to(self.kernel.dtype)

    def _factorized(self, query: Tensor, site: Site) -> FactorPair:
        """Return scale * <query_i + w, R(i - j) W>, by the addition theorem, for query (batch, heads, n_q,
        head_dim)."""
        query = (query + self._bias(self.position_bias, site.layer, query)) * self.content_scale(site)
        kernel = (
            self.kernel[self.model.layer_of_pass[site.layer]].unflatten(-1, (self.model.num_heads, -1)).transpose(0, 1)
        )
        to_sin, to_cos = (query @ kernel.mT.to(query.dtype)).chunk(2, -1)  # (batch, heads, n_q, hidden_size / 2)
        values = [
            torch.atleast_2d(position_values(positions, query.device))
            for positions in (site.query_positions, site.key_positions)
        ]
        (sin, cos), (key_sin, key_cos) = (
            self._waves(positions).unsqueeze(1).to(query.dtype).chunk(2, -1) for positions in values
        )
        query_factors = torch.cat((to_sin * sin + to_cos * cos, to_cos * sin - to_sin * cos), -1)
        key_factors = torch.cat((key_cos, key_sin), -1)
        if self.reset_cls:
            is_token = [(positions > 0)[:, None, :, None].to(query.dtype) for positions in values]
            query_factors, key_factors = query_factors * is_token[0], key_factors * is_token[1]
        return FactorPair(query_factors, key_factors.expand(-1, query.shape[1], -1, -1))
