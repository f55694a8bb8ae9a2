"""The base class of position methods, with hooks that do nothing by default, and the functions that several methods
share."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ..checks import check_kind, check_range
from ..errors import InputError, short_repr
from ..kernels import attention
from ..kernels.make_call import SoftmaxOptions, show_options
from ..kernels.terms import (
    DenseBias,
    OffsetBias,
    Positions,
    PositionsLike,
    Term,
    offset_range,
    offsets_between,
    position_values,
)
from ..kernels.tracing import are_static, can_read
from .site import Site
from .tables import Sources

if TYPE_CHECKING:
    from jaxtyping import Float, Real

MAX_INTEGER = 2**20
"""The largest size and the largest integer option: the time that some methods take to be built grows with them."""
MAX_POSITIONS = 2**31 - 1
"""The largest number of positions of a table."""

_KINDS = {"int": int, "float": float, "bool": bool, "str": str}
"""The kind of a value by the annotation of the option."""


def check_value(field: str, value: Any, annotation: str, max_integer: int = MAX_INTEGER) -> None:
    """Check a size or option by its annotation, since config.json, which is not trusted, may contain it.

    Raises:
        InputError: for a value of another type, a number that is not finite, or an integer beyond ``max_integer``.
    """
    kind = _KINDS.get(annotation.partition(" | ")[0])
    if kind is None or (value is None and annotation.endswith("None")):
        return
    check_kind(field, value, kind)
    if kind is int:
        check_range(field, value, -max_integer, max_integer)
    # An integer may be beyond all floats.
    if kind is float and not (abs(value) < 2**1023 if isinstance(value, int) else math.isfinite(value)):
        raise InputError(field, f"expected a finite number, got {short_repr(value)}")


def check_min(minimum: int, **options: float | None) -> None:
    """Check that options, passed by name, are at least ``minimum``; None passes.

    Raises:
        InputError: for the first option that is smaller, by its name.
    """
    for name, value in options.items():
        if value is not None:
            check_range(name, value, minimum)


class PositionRangeError(ValueError):
    """A position lies beyond the range of a method with a fixed number of positions."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of the model that a position method is built for.

    Args:
        hidden_size: width of the hidden states.
        num_heads: number of attention heads.
        num_layers: number of attention layers; a shared layer counts once per pass. 1 by default.
        max_length: the number of positions in tables of a fixed size; 512 by default.
        causal: whether keys to the right are always masked, also by ``attend``; False by default.
        head_dim: width of one head; None: hidden_size / num_heads.
        embedding_size: width at the input, where ``embed`` acts (ALBERT: below hidden_size); None: hidden_size.
        initializer_range: standard deviation of the model's own initial weights, for methods that follow it; 0.02 by
            default.
        layer_of_pass: for each of the ``num_layers``, the index of its distinct layer, for methods whose parameters
            are shared where the layers are. If None, all layers are distinct.
        separate_cls: whether the first token is [CLS], which is not pooled; False by default.

    The constructor replaces each None by its value, and ``dataclasses.replace`` keeps that value.

    Raises:
        InputError: for a size that does not fit.
    """

    hidden_size: int
    num_heads: int
    num_layers: int = 1
    max_length: int = 512
    causal: bool = False
    head_dim: int = None  # type: ignore[assignment]  # filled in below, as the two others
    embedding_size: int = None  # type: ignore[assignment]
    initializer_range: float = 0.02
    layer_of_pass: tuple[int, ...] = None  # type: ignore[assignment]
    separate_cls: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_layers", "max_length", "head_dim", "embedding_size"):
            size, optional = getattr(self, name), name in ("head_dim", "embedding_size")
            max_integer = MAX_POSITIONS if name == "max_length" else MAX_INTEGER
            check_value(name, size, "int | None" if optional else "int", max_integer)
            check_min(1, **{name: size})
        for name, kind in (("causal", "bool"), ("separate_cls", "bool"), ("initializer_range", "float")):
            check_value(name, getattr(self, name), kind)
        if self.initializer_range <= 0:
            raise InputError("initializer_range", f"expected a positive number, got {self.initializer_range}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise InputError("num_heads", f"{self.num_heads} heads do not divide hidden_size {self.hidden_size}")
        layers: Any = range(self.num_layers) if self.layer_of_pass is None else self.layer_of_pass
        are_integers = isinstance(layers, range | list | tuple) and all(isinstance(layer, Integral) for layer in layers)
        if not are_integers or len(layers) != self.num_layers or min(layers) < 0:
            expected = f"expected a number for each of {self.num_layers} layers"
            raise InputError("layer_of_pass", f"{expected}, got {short_repr(layers)}")
        values = {
            "head_dim": self.head_dim or self.hidden_size // self.num_heads,
            "embedding_size": self.embedding_size or self.hidden_size,
            "layer_of_pass": tuple(layers),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen


_HOOKS = {
    "embed": ("embeddings",),
    "transform_qkv": ("queries", "keys"),
    "terms": ("scores",),
    "content_terms": ("scores",),
}
"""The inputs that a hook changes, unless the class sets ``acts_on``."""

ACTS_ON = ("embeddings", "queries", "keys", "values", "scores")
"""Everything that a method may act on."""


class PositionMethod(nn.Module):
    """Base of all position methods.

    Models call :meth:`embed` once, and :meth:`attend` instead of ``whereformer.attention`` in every layer. A method
    overrides the hooks that it needs: ``embed``, ``transform_qkv``, ``terms`` and ``content_terms``. ``site.layer``
    counts attention layers from 0, a shared layer once per pass, so a method can have separate parameters in every
    layer even where the layers share theirs.

    A constructor takes the :class:`ModelShape` and the method's options as keyword-only arguments.

    The attributes below are facts about the method, which models, tests and documentation read. Where a fact depends
    on an option, the instance has the value.
    """

    paper: ClassVar[str] = ""
    """The authors of the method's paper, such as "Press et al."."""

    year: ClassVar[int | None] = None
    """The year of the paper."""

    acts_on: frozenset[str] = frozenset()
    """The inputs that the method changes, any of ``ACTS_ON``. By default, the overridden hooks decide: ``embed`` acts
    on "embeddings", ``transform_qkv`` on "queries" and "keys", and terms act on "scores". For "embeddings", a model has
    to call ``embed`` below layer 0; for everything else, it calls ``attend``."""

    extrapolates: bool = True
    """Whether positions of ``max_length`` and above have a meaning. If not, they raise a PositionRangeError."""

    accepts_fractional: bool = True
    """Whether positions may be fractional. If not, they raise a TypeError."""

    shift_invariant: bool = False
    """Whether attention stays the same if one number is added to all positions. It is False where an option gives
    [CLS], the token at position 0, a special meaning."""

    num_axes: int | None = None
    """The number of axes of positions (batch, n, axes) that the method accepts besides (n,) and (batch, n); None: it
    does not accept axes."""

    uses_query_key: bool = True
    """Whether scores include query . key. It is False for a Synthesizer that replaces them."""

    needs_query_key: bool = False
    """Whether the method acts on query or key. Such a method can't be joined with one that replaces their product."""

    others_change_query: bool = False
    """Whether a method that this one is joined with changes the query after ``content_terms``. ``CompositeMethod`` sets
    it."""

    reads_keys: bool = False
    """Whether ``content_terms`` reads the keys. A key-value cache then holds keys and values as they are before
    ``transform_qkv``, so that the method receives all of them."""

    rotates_any_heads: bool = False
    """Whether ``transform_qkv`` accepts keys and values with fewer heads than the query. If not, they are repeated
    first."""

    one_sided: bool = False
    """Whether the method has no parameters for keys to the right, because it was built for causal attention."""

    scales_query: bool = False
    """Whether ``transform_qkv`` multiplies the query by a ``query_factor``."""

    embedding_scale: float = 1.0
    """The factor on token embeddings before ``embed``."""

    options_for_others: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options for the methods that this one is joined with, if they have them."""

    _like: Tensor
    _embed_called: bool
    """Whether ``embed`` has been called, or a warning said that it has not been."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.model = model
        self._embed_called = False
        # It moves with the model, so that a method without parameters knows the device and dtype.
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "embed" in vars(cls):
            cls.embed = _record_embed_call(cls.embed)  # type: ignore[method-assign]
        if "acts_on" not in vars(cls):
            cls.acts_on = cls.acts_on.union(*(inputs for hook, inputs in _HOOKS.items() if hook in vars(cls)))

    def extra_repr(self) -> str:
        """The model's sizes, and the options that the method stores under their names."""
        options = [name for name in inspect.signature(type(self)).parameters if name in vars(self)]
        sizes = f"heads={self.model.num_heads}, layers={self.model.num_layers}"
        return ", ".join([sizes, *(f"{name}={vars(self)[name]!r}" for name in options if name != "model")])

    def acts_in_attention(self, layer: int | None = None) -> bool:
        """Whether the method does anything in :meth:`attend`, in one layer or, if None, in any layer."""
        return any(method.acts_on - {"embeddings"} for method in self.components(layer))

    @show_options(SoftmaxOptions)
    def attend(
        self,
        hidden: Float[Tensor, "batch n_q hidden_size"],
        query: Float[Tensor, "batch heads n_q head_dim"] | None,
        key: Float[Tensor, "batch key_heads n_k head_dim"] | None,
        value: Float[Tensor, "batch key_heads n_k head_dim"],
        site: Site,
        terms: Sequence[Term] = (),
        *,
        return_lse: bool = False,
        backend: str = "auto",
        **options: Unpack[SoftmaxOptions],
    ) -> Any:
        """Run attention with the method: all its hooks in a layer except ``embed``, then :func:`whereformer.attention`.

        Any method can replace any other in this call. One that replaces query . key (a Synthesizer) ignores query and
        key.

        Args:
            hidden: (batch, n_q, hidden_size), the layer's input at the queries.
            query: (batch, heads, n_q, head_dim), projected. For a method that replaces query . key, query and key may
                both be None.
            key: (batch, heads, n_k, head_dim).
            value: (batch, heads, n_k, head_dim).
            site: the positions, masks and layer. Attention is causal if the site is, or if the method was built so.
            terms: further terms, besides the method's.
            options: the arguments of :func:`whereformer.attention` that a site does not have.

        Returns:
            The result of :func:`whereformer.attention`: (batch, heads, n_q, head_dim), with ``return_lse`` a pair.

        Raises:
            InputError: for a layer that the method was not built for, for no query if the method acts on it, or for a
                ``site.causal`` that does not fit the ``causal`` that the method was built with.
            TypeError, ValueError: as :func:`whereformer.attention`.
        """
        if site.causal is False and self.model.causal:
            raise InputError("causal", "the method was built with causal=True, got False")
        if site.causal and not self.model.causal and any(method.scales_query for method in self.components()):
            reason = "the method was built to count keys on both sides; pass causal=True to build_position"
            raise InputError("causal", reason)
        if not self._embed_called and not torch.compiler.is_compiling():
            self._warn_missing_embed()
        query, key, value, method_terms = self.apply_hooks(hidden, query, key, value, site)
        site_options: dict[str, Any] = {**site.options(query), "causal": bool(site.causal or self.model.causal)}
        other_options: dict[str, Any] = {**options, "return_lse": return_lse, "backend": backend}
        return attention(query, key, value, (*method_terms, *terms), **site_options, **other_options)

    def apply_hooks(
        self,
        hidden: Float[Tensor, "batch n_q hidden_size"],
        query: Float[Tensor, "batch heads n_q head_dim"] | None,
        key: Float[Tensor, "batch key_heads n_k head_dim"] | None,
        value: Float[Tensor, "batch key_heads n_k head_dim"],
        site: Site,
    ) -> tuple[Tensor | None, Tensor | None, Tensor, tuple[Term, ...]]:
        """Run the hooks of a layer; the arguments are those that :meth:`attend`, which calls this, has.

        Call :func:`whereformer.attention` with the result, with ``causal=True`` if the method was built so. Keys and
        values may have fewer heads than queries; they are repeated for methods that act on them. If a cache holds the
        keys of earlier calls, ``key`` and ``value`` are the new ones, at ``site.new_key_positions``. A method that
        ``reads_keys`` needs all keys, as they are before this call.

        Returns:
            Query, key and value for attention, and the terms. Query and key are None if the method replaces them.
        """
        batch, n_q = hidden.shape[:2]
        key_sizes = (batch, value.shape[2]) if site.new_key_positions is None else None
        self.check_axes("site.query_positions", site.query_positions, (batch, n_q))
        self.check_axes("site.key_positions", site.key_positions, key_sizes)
        self.check_layer(site.layer, "site.layer")
        name = type(self).__name__
        if query is None and self.uses_query_key and self.needs_query_key:
            raise InputError("query", f"{name} acts on query and key: expected tensors, got None")
        if site.new_key_positions is not None and self.reads_keys:
            reason = f"{name} needs all keys, not only the new ones: cache keys before this call, and pass all of them"
            raise InputError("site.new_key_positions", reason)
        query, key, value = self._with_heads(query, key, value, site.layer)
        terms = self.terms(hidden, site)
        if not self.uses_query_key or query is None or key is None:
            return None, None, value, terms
        terms += self.content_terms(query, key, site)
        return (*self.transform_qkv(query, key, value, site), terms)

    def _with_heads(
        self, query: Tensor | None, key: Tensor | None, value: Tensor, layer: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Check the heads, and repeat the heads of keys and values if the method acts on them."""
        if not self.acts_in_attention(layer):
            return query, key, value
        heads, width = self.model.num_heads, self.model.head_dim
        if query is not None and query.dim() == 4 and query.shape[1::2] != (heads, width):
            shape = tuple(query.shape)
            raise InputError("query", f"the method was built for {heads} heads of width {width}, got {shape}")
        if value.dim() != 4 or value.shape[1] == heads or heads % max(value.shape[1], 1):
            return query, key, value
        needs_all_heads = [
            method.reads_keys or (method.overrides_transform_qkv() and not method.rotates_any_heads)
            for method in self.components(layer)
        ]
        if self.uses_query_key and not any(needs_all_heads):
            return query, key, value
        groups = heads // value.shape[1]
        repeated_key = None if key is None else key.repeat_interleave(groups, 1)
        return query, repeated_key, value.repeat_interleave(groups, 1)

    def _warn_missing_embed(self) -> None:
        self._embed_called = True
        if "embeddings" in self.acts_on:
            names = [type(method).__name__ for method in self.components() if "embeddings" in method.acts_on]
            message = f"{' and '.join(names)} acts on the embeddings, but embed was never called"
            advice = "before the first layer, use hidden = position.embed(hidden, positions)"
            warnings.warn(f"{message}; {advice}", stacklevel=3)

    def overrides_transform_qkv(self) -> bool:
        """Return whether the method changes query, key or value other than by its ``query_factor``."""
        return type(self).transform_qkv is not PositionMethod.transform_qkv

    def components(self, layer: int | None = None) -> tuple[PositionMethod, ...]:
        """The methods that this one consists of, or those that act in one layer; only itself if it is not a
        composite."""
        return (self,)

    def depends_on_offsets_only(self) -> bool:
        """Whether attention depends on offsets only, so that packed texts may have the positions of their row."""
        return self.shift_invariant or not self.acts_in_attention()

    def check_layer(self, layer: int, name: str = "layer") -> None:
        """Raise an InputError that names the argument for a layer that the method was not built for."""
        if not 0 <= layer < self.model.num_layers:
            reason = f"the method was built for {self.model.num_layers} layers, got layer {layer}, counted from 0"
            raise InputError(name, f"{reason}; pass num_layers to build_position")

    def check_axes(self, name: str, positions: PositionsLike, sizes: tuple[int, int] | None = None) -> None:
        """Raise an InputError that names the argument for positions (batch, n, axes) that the method does not accept.

        ``sizes`` are the batch and n, if they are known. Values are checked only on the CPU.
        """
        if isinstance(positions, Positions) or positions.dim() != 3:
            return
        wrong_dtype = positions.is_complex() or positions.dtype is torch.bool
        if wrong_dtype or (can_read(positions) and not positions.isfinite().all()):
            raise InputError(name, f"expected finite numbers, got {short_repr(positions)}")
        if sizes is not None and (positions.shape[0] not in (1, sizes[0]) or positions.shape[1] != sizes[1]):
            expected = f"(1 or {sizes[0]}, {sizes[1]}, axes)"
            raise InputError(name, f"expected shape {expected}, got {tuple(positions.shape)}")
        for method in self.components():
            if method.acts_on and method.num_axes != positions.shape[2]:
                shapes = "(n,) or (batch, n)" + (f" or (batch, n, {method.num_axes})" if method.num_axes else "")
                accepts = f"{type(method).__name__} accepts positions {shapes}, got {tuple(positions.shape)}"
                raise InputError(name, f"{accepts}; rope accepts several axes with its option sections")

    def check_hidden(self, hidden: Tensor) -> None:
        """Raise an InputError if a layer's input has the wrong width, for methods that read it."""
        width = self.model.hidden_size
        if hidden.dim() != 3 or hidden.shape[2] != width:
            raise InputError("hidden", f"expected (batch, n_q, hidden_size {width}), got {tuple(hidden.shape)}")

    def reset_parameters(self) -> None:
        """Draw the initial values, only through ``torch.nn.init``: loaders switch it off to keep loaded weights."""

    def embed(
        self, hidden: Float[Tensor, "batch n embedding_size"], positions: PositionsLike
    ) -> Float[Tensor, "batch n embedding_size"]:
        """Add position to the embeddings (batch, n, embedding_size). Models call this once, below layer 0.

        ``hidden`` has been multiplied by ``embedding_scale``.
        """
        return hidden

    def vectors(
        self, positions: PositionsLike, device: torch.device | str | None = None
    ) -> Float[Tensor, "n width"] | Float[Tensor, "batch n width"] | None:
        """Return the vector of each position, (n, width) or (batch, n, width); None if the method has no vectors.

        These are the vectors before any norm or projection. All layers have the same.
        """
        return None

    def compute_shared(self, site: Site) -> Any:
        """Compute what all layers with a site's positions share, for ``site.shared``, which the hooks below read.

        A model calls this for every pair of sequences in a forward (a funnel has several). The layer of the site does
        not matter.
        """
        return None

    def with_shared(self, site: Site) -> Site:
        """Return the site with the result of :meth:`compute_shared`.

        The tables of all layers are then computed once and together. Without it, each layer computes its own.
        """
        return replace(site, shared=self.compute_shared(site))

    def get_shared(self, site: Site) -> Any:
        """Return ``site.shared``, or if it is None, the result of :meth:`compute_shared`."""
        return self.compute_shared(site) if site.shared is None else site.shared

    def transform_qkv(
        self,
        query: Float[Tensor, "batch heads n_q head_dim"],
        key: Float[Tensor, "batch key_heads n_k head_dim"],
        value: Float[Tensor, "batch key_heads n_k head_dim"],
        site: Site,
    ) -> tuple[
        Float[Tensor, "batch heads n_q head_dim"],
        Float[Tensor, "batch key_heads n_k head_dim"],
        Float[Tensor, "batch key_heads n_k head_dim"],
    ]:
        """Change projected query, key and value, each of shape (batch, heads, n, head_dim), in every layer.

        By default, a method that ``scales_query`` multiplies the query by its factor, and others change nothing.
        """
        if self.scales_query:
            query = (query * self.query_factor(query, site)).to(query.dtype)
        return query, key, value

    def terms(self, hidden: Float[Tensor, "batch n_q hidden_size"], site: Site) -> tuple[Term, ...]:
        """Return the terms that position adds to scores and values.

        ``hidden`` (batch, n_q, hidden_size) is the layer's input at the queries.
        """
        return ()

    def content_terms(
        self, query: Float[Tensor, "batch heads n_q head_dim"], key: Float[Tensor, "batch _ _ head_dim"], site: Site
    ) -> tuple[Term, ...]:
        """Return terms that depend on the projected query (batch, heads, n_q, head_dim) or key.

        They are the query and key before ``transform_qkv``. With a key-value cache, ``key`` holds only the new keys,
        unless the method sets ``reads_keys``.
        """
        return ()

    def query_factor(
        self, query: Float[Tensor, "batch heads n_q _width"], site: Site
    ) -> Float[Tensor, "#batch #heads n_q 1"]:
        """Return the factor that ``transform_qkv`` multiplies the query by, (1 or batch, 1 or heads, n_q, 1).

        Only a method that ``scales_query`` has one. Methods that are joined with this one receive the query with this
        factor in ``content_terms``, so that all products with the query have it.
        """
        raise NotImplementedError

    def content_scale(self, site: Site) -> float:
        """Return the factor on query . key in this layer, for terms that must have the same factor."""
        return self.model.head_dim**-0.5 if site.scale is None else site.scale

    def curve(
        self, offsets: Real[Tensor, "*offsets"] | Sequence[float], *, layer: int = 0
    ) -> Float[Tensor, "heads *offsets"] | None:
        """Return the number that each head adds to a score at each offset, (heads, \\*offsets); None if the
        method has no curve.

        Offsets have any shape: the offsets between explicit positions are a matrix.
        The curve has the precision of the parameters, and at least float32: bfloat16 cannot represent the offset 1,001.
        Parameters that are read from a table keep their precision.
        """
        return None

    def kernel_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters that are kernels; a training may give them a separate learning rate."""
        return ()


def _record_embed_call(embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a method's ``embed``, which then also records that it was called and checks the positions."""

    @functools.wraps(embed)
    def recording_embed(self: PositionMethod, hidden: Tensor, positions: PositionsLike) -> Tensor:
        if not torch.compiler.is_compiling():
            self._embed_called = True
        self.check_axes("positions", positions)
        length = positions.length if isinstance(positions, Positions) else positions.shape[min(positions.dim(), 2) - 1]
        if length != hidden.shape[1]:
            raise InputError("positions", f"expected those of {hidden.shape[1]} tokens, got {length}")
        return embed(self, hidden, positions)

    return recording_embed


class OffsetFunction(PositionMethod):
    """A method that adds one number per head and offset to the scores, its ``curve``, and does nothing else."""

    shift_invariant = True

    shares_curve: bool = False
    """Whether all layers have the same curve. They then share its terms."""

    def reach(self, *, layer: int = 0) -> int | None:
        """Return the absolute offset beyond which the curve is constant in each direction; None if there is none."""
        return None

    def reach_per_layer(self) -> Sequence[int | None]:
        """Return the reach of every layer. A method may override this to compute all of them at once."""
        return [self.reach(layer=layer) for layer in range(self.model.num_layers)]

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        raise NotImplementedError

    def curve_sources(self) -> tuple[Tensor, ...]:
        """Return all tensors that ``curve`` and ``reach`` read, if nothing else may change their results.

        In evaluation, tables are then computed again only after one of these has changed; by default, in each forward.
        """
        return ()

    def curve_per_layer(self, offsets: Tensor) -> Sequence[Tensor]:
        """Return the curve of every layer, each of shape (heads, offsets). A method may override this to compute all
        of them at once."""
        return [self.curve(offsets, layer=layer) for layer in range(self.model.num_layers)]

    def compute_shared(self, site: Site) -> Sequence[tuple[Term, ...]] | None:
        """Return the terms of every layer.

        None if each pair of tokens needs its own number: such terms are large, and a layer frees its own after use.
        """
        if self.shares_curve:
            return [self.terms_at(site.at_layer(0))] * self.model.num_layers
        sources = Sources(self, *self.curve_sources())
        spans: list[tuple[int, int]] = []
        for reach in sources.get_or_compute("reaches", None, self.reach_per_layer):
            span = site_span(site, reach)
            if span is None:
                return None
            spans.append(span)
        first, stop = min(low for low, _ in spans), max(high for _, high in spans) + 1

        def build_terms() -> list[tuple[Term, ...]]:
            curves = self.curve_per_layer(torch.arange(first, stop, device=self._like.device))
            # A part that is all would be an operation too.
            tables = [
                curve if (low, high + 1) == (first, stop) else curve[:, low - first : high + 1 - first]
                for curve, (low, high) in zip(curves, spans, strict=True)
            ]
            return [(OffsetBias(table, low),) for table, (low, _) in zip(tables, spans, strict=True)]

        return sources.get_or_compute("curves", tuple(spans), build_terms)

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        terms: tuple[Term, ...] = self.terms_at(site) if site.shared is None else site.shared[site.layer]
        return terms

    def terms_at(self, site: Site) -> tuple[Term, ...]:
        """Return the terms of one layer; they do not depend on the hidden states.

        Raises:
            TypeError: for fractional positions, if the method does not accept them.
        """
        device = self._like.device
        span = site_span(site, self.reach(layer=site.layer))
        if span is not None:
            first, last = span
            table = Sources(self, *self.curve_sources()).get_or_compute(
                ("curve", site.layer),
                span,
                lambda: self.curve(torch.arange(first, last + 1, device=device), layer=site.layer),
            )
            return (OffsetBias(table, first),)
        # Explicit positions can be anywhere: evaluate the curve at the offsets that occur.
        query_values = position_values(site.query_positions, device)
        offsets = offsets_between(query_values, position_values(site.key_positions, device))
        if offsets.is_floating_point() and not self.accepts_fractional:
            raise TypeError(f"{type(self).__name__}: needs integer positions, got fractional ones")
        scores = self.curve(offsets, layer=site.layer)
        return (DenseBias(scores.transpose(0, 1) if offsets.dim() == 3 else scores.unsqueeze(0)),)


def offset_span(
    query_positions: PositionsLike, key_positions: PositionsLike, reach: int | None
) -> tuple[int, int] | None:
    """Return the first and last offset that a table must cover, or None if only the data determine them.

    Beyond ``reach`` a curve is constant, so the table ends there. The span holds at least one offset.
    """
    span = offset_range(query_positions, key_positions)
    if span is not None:
        first, last = span
        if reach is not None and not are_static(first, last):
            # A compiled program for any length has the same table for all lengths.
            return -reach, reach
        if reach is not None:
            first, last = (max(-reach, min(reach, offset)) for offset in (first, last))
        return first, last
    are_integers = not any(
        isinstance(positions, Tensor) and positions.is_floating_point()
        for positions in (query_positions, key_positions)
    )
    return (-reach, reach) if reach is not None and are_integers else None


def site_span(site: Site, reach: int | None) -> tuple[int, int] | None:
    """Return the first and last offset that a table for a site must cover, by :func:`offset_span` and the bounds of the
    site's positions."""
    max_offset = None if site.position_stop is None else max(site.position_stop - 1 - site.min_position, 0)
    bounds = [bound for bound in (reach, max_offset) if bound is not None]
    return offset_span(site.query_positions, site.key_positions, min(bounds, default=None))


def as_offsets(offsets: Tensor | Sequence[float], like: Tensor) -> Tensor:
    """Return offsets, a tensor of any shape or a sequence of numbers, as a tensor on the device of ``like``.

    A ``curve`` calls this first. The dtype of a tensor stays; evaluate a function of offsets in :func:`float_dtype`.
    """
    return torch.as_tensor(offsets, device=like.device)


def float_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype to evaluate a function of offsets in: the dtype of the parameter, but at least float32.

    Half precision does not have all integers: bfloat16 lacks offsets from 257 on, float16 from 2049 on.
    """
    return parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32


def table_rows(
    positions: PositionsLike, num_rows: int, name: str, device: torch.device, min_position: int = 0
) -> Tensor:
    """Return the row indices of positions in a table of ``num_rows`` positions, (n,) or (batch, n).

    ``min_position`` is a bound that no position is below. It is negative where pooling moves [CLS] to the left; [CLS]
    has the first row.

    Raises:
        PositionRangeError: if a position has no row. Explicit positions are checked only on the CPU. On other devices
            and in compiled code, reading them would stall the device, so torch's own index check reports them.
        TypeError: for fractional positions.
    """
    if isinstance(positions, Positions):
        # The [CLS] of a pooled sequence is one stride before the token at 1, and nothing precedes it.
        first = 0 if positions.start == 1 - positions.stride else positions.start
        if positions.length > 0 and (first < 0 or positions.last >= num_rows):
            raise out_of_range(name, num_rows, first if first < 0 else positions.last)
        return position_values(positions, device).clamp(min=0)
    if positions.is_floating_point():
        raise TypeError(f"{name}: needs integer positions, got {positions.dtype}")
    positions = position_values(positions, device)
    if can_read(positions) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < min_position or high >= num_rows:
            raise out_of_range(name, num_rows, low if low < 0 else high)
    elif not min_position:
        # A negative index would silently count from the end.
        return positions.masked_fill(positions < 0, num_rows)
    return positions.clamp(min=0) if min_position else positions


def out_of_range(name: str, num_rows: int, position: int) -> PositionRangeError:
    """Return the error for a position that a table of ``num_rows`` positions lacks."""
    covered = f"{name} covers positions 0 to {num_rows - 1} (max_length {num_rows}), got position {position}"
    return PositionRangeError(f"{covered}; raise max_length or choose a method that extrapolates")


def position_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters of position by name: the parameters of its methods, and the sinks of its
    attention."""
    methods = [module for module in model.modules() if isinstance(module, PositionMethod)]
    method_ids = {id(parameter) for method in methods for parameter in method.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in method_ids or name.endswith(".sinks")
    }
