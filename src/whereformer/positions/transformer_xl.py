"""Relative attention of Transformer-XL (Dai et al. 2019) and Funnel-Transformer (Dai et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
from ..kernels.torch_private import transforming
from .base import ModelShape, Position
from .site import Site

FORMS = ("shifted", "factorized")

MOST_KEPT = 2**22
"""The most numbers that are kept for the next forward, in sinusoids and in each layer's vectors: a few lengths in a few
blocks. Nothing is kept for longer sequences: there, attention takes so long that computing this again costs little."""


class RecentTensors:
    """A cache of tensors: the most recent ones, with at most ``MOST_KEPT`` numbers together.

    Copies and unpickled instances are empty.
    """

    def __init__(self) -> None:
        self.tensors: dict[Any, Tensor] = {}

    def get(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor kept under this key, or make it now."""
        found = self.tensors.pop(key, None)
        if found is None:
            found = make()
        # Tensors of tracing or of transforms are of no use outside of them.
        if type(found) is Tensor and not transforming():
            self.tensors[key] = found
            while sum(tensor.numel() for tensor in list(self.tensors.values())) > MOST_KEPT:
                self.tensors.pop(next(iter(self.tensors)), None)
        return found

    def __reduce__(self) -> tuple[type[RecentTensors], tuple[()]]:
        return RecentTensors, ()


@dataclass
class Window:
    """The offsets between two affine sequences: ``first``, ``first + step``, ... ``last``.

    Args:
        waves: the sinusoids of these offsets, (T, hidden_size).
        vectors: each distinct layer's projection of them, (heads, T, head_dim), by layer; kept for inference only.
    """

    first: int
    last: int
    step: int
    waves: Tensor
    vectors: dict[int, Tensor] = field(default_factory=dict)


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
        if form not in FORMS:
            raise InputError("form", f"expected one of {', '.join(FORMS)}, got {form!r}")
        if model.hidden_size % 2:
            raise InputError("hidden_size", f"transformer_xl needs an even one, got {model.hidden_size}")
        if not 0.0 <= dropout < 1.0:
            raise InputError("dropout", f"expected a number in [0, 1), got {dropout}")
        self.form = form
        self.reset_cls = model.separate_cls if reset_cls is None else reset_cls
        self.dropout = nn.Dropout(dropout)
        self._waves_kept = RecentTensors()
        self._vectors_kept: dict[int, tuple[Tensor, RecentTensors]] = {}
        layers, heads = max(model.passes) + 1, (model.num_heads, model.head_dim)
        self.content_bias = nn.Parameter(torch.empty(layers, *heads))
        self.position_bias = nn.Parameter(torch.empty(layers, *heads))
        self.kernel = nn.Parameter(torch.empty(layers, model.hidden_size, model.num_heads * model.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.model.initializer_range
        for parameter in (self.content_bias, self.position_bias, self.kernel):
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)

    def prepare_for(self, site: Site, prepared: None = None) -> Window | None:
        if self.form == "factorized":
            return None
        queries, keys = site.queries, site.keys
        span = offset_range(queries, keys)
        if span is None:
            return None
        assert isinstance(queries, Positions)
        assert isinstance(keys, Positions)
        step = offset_step(queries, keys) or 1
        return Window(*span, step, self.dropout(self._waves_of(*span, step)))

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        return query + self._bias(self.content_bias, site.layer, query), key, value

    def content_terms(self, query: Tensor, key: Tensor, site: Site) -> tuple[Term, ...]:
        window = self.shared_at(site)
        if window is None:
            return (self._factorized(query, site),)
        vectors = self._vectors(window, site.layer)
        # The query has u added already.
        more = (self.position_bias - self.content_bias)[self.model.passes[site.layer]].unsqueeze(-1)
        table = (vectors @ more.to(vectors.dtype)).squeeze(-1) * self.content_scale(site)
        terms = OffsetKeys(vectors, window.first, window.step), OffsetBias(table, window.first, window.step)
        return (*terms, *self._without_cls(query, site, vectors, window)) if self.reset_cls else terms

    def _bias(self, biases: Tensor, layer: int, like: Tensor) -> Tensor:
        return biases[self.model.passes[layer]].unsqueeze(1).to(like.dtype)

    def _project(self, waves: Tensor, kernel: Tensor) -> Tensor:
        """Return R W, (heads, T, head_dim), for sinusoids R (T, hidden_size) and the W of a layer."""
        return functional.linear(waves, kernel.mT).unflatten(-1, (self.model.num_heads, -1)).transpose(0, 1)

    def _waves(self, distances: Tensor) -> Tensor:
        """Return R at distances (...): (..., hidden_size) in the parameters' dtype."""
        half = self.model.hidden_size // 2
        pair = torch.arange(half, dtype=torch.float64, device=distances.device)
        angles = distances.to(torch.float64).unsqueeze(-1) * 10_000.0 ** (-pair / half)
        return torch.cat((angles.sin(), angles.cos()), -1).to(self.kernel.dtype)

    def _waves_of(self, first: int, last: int, step: int) -> Tensor:
        """Return R at a window's distances, (T, hidden_size), from an earlier forward if it is still kept."""

        def make() -> Tensor:
            return self._waves(-torch.arange(first, last + 1, step, device=self.kernel.device))

        if torch.compiler.is_compiling():
            return make()
        # Training could not use tensors made in inference mode.
        with torch.inference_mode(False):
            return self._waves_kept.get((first, last, step, self.kernel.device, self.kernel.dtype), make)

    def _vectors(self, window: Window, layer: int) -> Tensor:
        """Project the window's sinusoids for a layer, (heads, T, head_dim); for shared layers only once.

        With gradients every layer projects anew: a checkpointed layer runs again and has to repeat what it did.
        """
        distinct = self.model.passes[layer]
        kernel = self.kernel[distinct]
        if torch.is_grad_enabled():
            return self._project(window.waves, kernel)
        if distinct not in window.vectors:
            # Comparing the kernel is cheap on the CPU only, and compiled code cannot do it.
            may_keep = kernel.device.type == "cpu" and not (torch.compiler.is_compiling() or transforming())
            dropped = self.training and self.dropout.p > 0
            if may_keep and not dropped:
                window.vectors[distinct] = self._vectors_again(window, distinct, kernel)
            else:
                window.vectors[distinct] = self._project(window.waves, kernel)
        return window.vectors[distinct]

    def _vectors_again(self, window: Window, distinct: int, kernel: Tensor) -> Tensor:
        """Return the vectors of an earlier forward if the kernel has not changed at all; else project anew."""
        used, vectors = self._vectors_kept.get(distinct, (None, RecentTensors()))
        if used is None or used.dtype != kernel.dtype or not torch.equal(used, kernel):
            used, vectors = kernel.clone(), RecentTensors()
        self._vectors_kept[distinct] = used, vectors
        return vectors.get((window.first, window.last, window.step), lambda: self._project(window.waves, kernel))

    def _without_cls(
        self,
        query: Tensor,
        site: Site,
        vectors: Tensor,
        window: Window,
    ) -> tuple[Term, ...]:
        """Return the terms that remove position from [CLS]'s row and column again, of rank one each."""
        query_positions, key_positions = site.queries, site.keys
        assert isinstance(query_positions, Positions)
        assert isinstance(key_positions, Positions)
        terms: list[Term] = []
        query_is_cls, key_is_cls = (
            (positions.values(query.device) <= 0).to(query.dtype) for positions in (query_positions, key_positions)
        )
        vectors = vectors.to(query.dtype)
        scale = self.content_scale(site)
        bias = self._bias(self.position_bias, site.layer, query)

        if key_positions.length and key_positions.start <= 0:
            offsets = key_positions.start - query_positions.values(query.device)
            column = vectors[:, (offsets - window.first) // window.step]  # (heads, n_q, head_dim)
            # Not computed from query + bias, which would have to be kept for the backward.
            wrong = torch.linalg.vecdot(query, column) + (bias * column).sum(-1)
            wrong = wrong * (query_is_cls - 1) * scale
            terms.append(FactorPair(wrong.unsqueeze(-1), key_is_cls[:, None].expand(1, query.shape[1], -1, 1)))
        if query_positions.length and query_positions.start <= 0:
            first = (key_positions.start - query_positions.start - window.first) // window.step
            every = max(1, key_positions.stride // window.step)  # a single key's may be shorter than a step
            row = vectors[:, first::every][:, : key_positions.length]  # (heads, n_k, head_dim)
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
