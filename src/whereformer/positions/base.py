"""The base class of position methods, with hooks that do nothing by default, and what several methods share."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from numbers import Real as RealNumber
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import InputError, shown
from ..kernels import attention
from ..kernels.call import shows_options
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
from ..kernels.tracing import are_numbers, can_look
from .site import Site

if TYPE_CHECKING:
    from jaxtyping import Float, Real

MOST = 2**20
"""The largest size and the largest whole number of an option; some methods work through as many numbers when they are
built."""
MOST_POSITIONS = 2**31 - 1
"""The most positions of a table."""

_KINDS: dict[str, tuple[Any, str]] = {
    "int": (Integral, "a whole number"),
    "float": (RealNumber, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "text"),
}


def check_value(field: str, value: Any, hint: str, most: int = MOST) -> None:
    """Check a size or option by its annotation, since config.json, which is untrusted, may give it.

    Raises:
        InputError: for a value of another kind, or a number beyond any use.
    """
    kind, named = _KINDS.get(hint.partition(" | ")[0], (object, ""))
    if kind is object or (value is None and hint.endswith("None")):
        return
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise InputError(field, f"expected {named}, got {shown(value)}")
    if kind is Integral and not -most <= value <= most:
        limit = f"at most {most}" if value > 0 else f"at least {-most}"
        raise InputError(field, f"expected {limit}, got {shown(value)}")
    # A whole number may be beyond all floats.
    if kind is RealNumber and not (abs(value) < 2**1023 if isinstance(value, int) else math.isfinite(value)):
        raise InputError(field, f"expected a finite number, got {shown(value)}")


def check_least(least: int, **options: float | None) -> None:
    """Raise an InputError for an option below the least number that it may be."""
    for name, number in options.items():
        if number is not None and number < least:
            raise InputError(name, f"expected at least {least}, got {shown(number)}")


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raise an InputError unless an option is one of those that there are."""
    if value not in known:
        raise InputError(name, f"expected one of {', '.join(known)}, got {value!r}")


class PositionRangeError(ValueError):
    """A position lies beyond what a method with a fixed number of positions can represent."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of the model that a position method serves.

    Args:
        hidden_size: width of the hidden states.
        num_heads: attention heads.
        num_layers: attention layers; a shared layer counts once per pass.
        max_length: the number of positions in tables of a fixed size.
        causal: whether keys to the right are masked everywhere.
        head_dim: width of one head; None: hidden_size / num_heads.
        embedding_size: width at the input, where ``embed`` acts (ALBERT: below hidden_size); None: hidden_size.
        initializer_range: standard deviation of the model's own fresh weights, for methods that follow it.
        layer_of_pass: for each of the ``num_layers``, the index of its distinct layer, for methods whose parameters
            are shared where the layers are. If None, all layers are distinct.
        separate_cls: whether the first token is [CLS], which pooling leaves alone.

    What is None is filled in at once; ``dataclasses.replace`` keeps it.

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
            most = MOST_POSITIONS if name == "max_length" else MOST
            check_value(name, size, "int | None" if optional else "int", most)
            check_least(1, **{name: size})
        for name, kind in (("causal", "bool"), ("separate_cls", "bool"), ("initializer_range", "float")):
            check_value(name, getattr(self, name), kind)
        if self.initializer_range <= 0:
            raise InputError("initializer_range", f"expected a positive number, got {self.initializer_range}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise InputError("num_heads", f"{self.num_heads} heads do not divide hidden_size {self.hidden_size}")
        layer_of_pass: Any = range(self.num_layers) if self.layer_of_pass is None else self.layer_of_pass
        whole = isinstance(layer_of_pass, range | list | tuple) and all(
            isinstance(layer, Integral) for layer in layer_of_pass
        )
        if not whole or len(layer_of_pass) != self.num_layers or min(layer_of_pass) < 0:
            raise InputError(
                "layer_of_pass",
                f"expected a number for each of {self.num_layers} layers, got {shown(layer_of_pass)}",
            )
        filled = {
            "head_dim": self.head_dim or self.hidden_size // self.num_heads,
            "layer_of_pass": tuple(layer_of_pass),
        }
        for name, value in {**filled, "embedding_size": self.embedding_size or self.hidden_size}.items():
            object.__setattr__(self, name, value)  # it is frozen


_OF_SITE = {
    "query_positions", "key_positions", "key_mask", "causal", "window", "scale", "query_documents", "key_documents",
}  # fmt: skip
"""The arguments of ``attention`` that a site has."""

_HOOKS = {
    "embed": ("embeddings",),
    "transform_qkv": ("queries", "keys"),
    "terms": ("scores",),
    "content_terms": ("scores",),
}
"""What a hook acts on, unless the class says otherwise."""

ACTS_ON = ("embeddings", "queries", "keys", "values", "scores")
"""All that a method may act on."""


class PositionMethod(nn.Module):
    """Base of all position methods.

    Models call :meth:`embed` once, and :meth:`attend` in place of ``whereformer.attention`` in every layer. A method
    overrides the hooks it needs: ``embed``, ``transform_qkv``, ``terms`` and ``content_terms``. ``site.layer`` counts
    attention layers from 0, a shared layer once per pass, so a method can have parameters of its own in every layer
    even where the layers share theirs.

    A constructor takes the :class:`ModelShape` and the method's own options as keyword-only arguments.

    The attributes below are facts about the method, which models, tests and documentation read. Where an option
    decides, the instance has the value.
    """

    paper: ClassVar[str] = ""
    """The authors of the method's paper, such as "Press et al."."""

    year: ClassVar[int | None] = None
    """The year of the paper."""

    acts_on: frozenset[str] = frozenset()
    """What the method changes: any of ``ACTS_ON``. By default, the overridden hooks decide: ``embed`` acts on
    "embeddings", ``transform_qkv`` on "queries" and "keys", and terms act on "scores". For "embeddings", a model has to
    call ``embed`` below layer 0; for everything else, it calls ``attend``."""

    extrapolates: bool = True
    """Whether positions of ``max_length`` and above have a meaning. If not, they raise a PositionRangeError."""

    accepts_fractional: bool = True
    """Whether positions may be fractional. If not, they raise a TypeError."""

    shift_invariant: bool = False
    """Whether the same number added to all positions changes nothing. It is False where an option gives [CLS], the
    token at position 0, a meaning of its own."""

    num_axes: int | None = None
    """The axes of positions (batch, n, axes) that the method takes besides (n,) and (batch, n); None: it takes none."""

    uses_query_key: bool = True
    """Whether scores include query . key. It is False for a Synthesizer that replaces them."""

    needs_query_key: bool = False
    """Whether the method acts on query or key. Such a method can't be joined with one that replaces their product."""

    others_change_query: bool = False
    """Whether a method that this one is joined with changes the query after ``content_terms``. ``CompositeMethod`` sets
    it."""

    reads_keys: bool = False
    """Whether ``content_terms`` reads the keys. A key-value cache then holds keys and values as they are before
    ``transform_qkv``, so that the method gets all of them."""

    rotates_any_heads: bool = False
    """Whether ``transform_qkv`` accepts keys and values with fewer heads than the query. If not, they are repeated
    first."""

    one_sided: bool = False
    """Whether it knows nothing of keys to the right, because it was built for causal attention."""

    scales_query: bool = False
    """Whether ``transform_qkv`` multiplies the query by a ``query_factor``."""

    embedding_scale: float = 1.0
    """What token embeddings are multiplied by before ``embed``."""

    options_for_others: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options for the methods that this one is joined with, where they have them."""

    _like: Tensor
    _embedded: bool
    """Whether ``embed`` has been called, or its lack told."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.model = model
        self._embedded = False
        # It moves with the model, so that a method without parameters knows the device and dtype.
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "embed" in vars(cls):
            cls.embed = _noted(cls.embed)  # type: ignore[method-assign]
        if "acts_on" not in vars(cls):
            cls.acts_on = cls.acts_on.union(*(on for hook, on in _HOOKS.items() if hook in vars(cls)))

    def extra_repr(self) -> str:
        """The model's sizes, and the method's options that it keeps under their names."""
        options = [name for name in inspect.signature(type(self)).parameters if name in vars(self)]
        sizes = f"heads={self.model.num_heads}, layers={self.model.num_layers}"
        return ", ".join([sizes, *(f"{name}={vars(self)[name]!r}" for name in options if name != "model")])

    def acts_in_attention(self, layer: int | None = None) -> bool:
        """Whether the method does anything in :meth:`attend`, in any layer or in one."""
        return any(method.acts_on - {"embeddings"} for method in self.components(layer))

    @shows_options(attention, without=_OF_SITE)
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
        **options: Any,
    ) -> Any:
        """Attention with everything that the method does in a layer: all its hooks but ``embed``, then
        :func:`whereformer.attention`.

        Any method takes the place of any other in this call. One that replaces query . key (a Synthesizer) ignores
        query and key.

        Args:
            hidden: (batch, n_q, hidden_size), the input of the queries' projection.
            query: (batch, heads, n_q, head_dim), projected; or None together with ``key`` for a method that replaces
                their product.
            key: (batch, heads, n_k, head_dim).
            value: (batch, heads, n_k, head_dim).
            site: which tokens attend to which, in which layer. Attention is causal where the method was built so.
            terms: more terms, besides the method's own.
            options: the arguments of :func:`whereformer.attention` that a site does not have.

        Returns:
            What :func:`whereformer.attention` returns: (batch, heads, n_q, head_dim), with ``return_lse`` a pair.

        Raises:
            InputError: for a layer that the method was not built for, no query where the method acts on it, or
                ``causal=False`` where it was built for causal attention alone.
            TypeError, ValueError: as :func:`whereformer.attention`.
        """
        if site.causal is False and self.model.causal:
            raise InputError("causal", "the method was built with causal=True, got False")
        if site.causal and not self.model.causal and any(each.scales_query for each in self.components()):
            raise InputError("causal", "the method counts keys on both sides; give build_position causal=True")
        if not self._embedded and not torch.compiler.is_compiling():
            self._tell_of_embeddings()
        query, key, value, own = self.apply_hooks(hidden, query, key, value, site)
        of_site: dict[str, Any] = {**site.options(query), "causal": bool(site.causal or self.model.causal)}
        options |= {"return_lse": return_lse, "backend": backend}
        return attention(query, key, value, (*own, *terms), **of_site, **options)

    def apply_hooks(
        self,
        hidden: Float[Tensor, "batch n_q hidden_size"],
        query: Float[Tensor, "batch heads n_q head_dim"] | None,
        key: Float[Tensor, "batch key_heads n_k head_dim"] | None,
        value: Float[Tensor, "batch key_heads n_k head_dim"],
        site: Site,
    ) -> tuple[Tensor | None, Tensor | None, Tensor, tuple[Term, ...]]:
        """Run the hooks of a layer; arguments are as in :meth:`attend`, which calls this.

        Call :func:`whereformer.attention` with the result, with ``causal=True`` if the method was built so. Keys and
        values may have fewer heads than queries; they are repeated for methods that act on them. If keys of earlier
        calls are in a cache, ``key`` and ``value`` are the new ones, at ``site.new_key_positions``. A method that
        ``reads_keys`` needs all keys, as they are before this call.

        Returns:
            Query, key and value for attention, and the terms. Query and key are None if the method replaces them.
        """
        batch, n_q = hidden.shape[:2]
        self.check_axes("site.query_positions", site.query_positions, (batch, n_q))
        self.check_axes(
            "site.key_positions",
            site.key_positions,
            (batch, value.shape[2]) if site.new_key_positions is None else None,
        )
        self.check_layer(site.layer, "site.layer")
        if query is None and self.uses_query_key and self.needs_query_key:
            raise InputError("query", f"{type(self).__name__} acts on query and key: expected tensors, got None")
        if site.new_key_positions is not None and self.reads_keys:
            name = type(self).__name__
            raise InputError(
                "site.new_key_positions", f"{name} reads all keys: cache them as they are, and act on all of them"
            )
        query, key, value = self._with_heads(query, key, value, site.layer)
        terms = self.terms(hidden, site)
        if not self.uses_query_key or query is None or key is None:
            return None, None, value, terms
        terms += self.content_terms(query, key, site)
        return (*self.transform_qkv(query, key, value, site), terms)

    def _with_heads(
        self, query: Tensor | None, key: Tensor | None, value: Tensor, layer: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Check the heads, and repeat those of keys and values if the method acts on them."""
        methods = self.components(layer)
        if not self.acts_in_attention(layer):
            return query, key, value
        heads, width = self.model.num_heads, self.model.head_dim
        if query is not None and query.dim() == 4 and query.shape[1::2] != (heads, width):
            raise InputError(
                "query", f"the method was built for {heads} heads of width {width}, got {tuple(query.shape)}"
            )
        if value.dim() != 4 or value.shape[1] == heads or heads % max(value.shape[1], 1):
            return query, key, value
        needs_all_heads = [
            method.reads_keys
            or (type(method).transform_qkv is not PositionMethod.transform_qkv and not method.rotates_any_heads)
            for method in methods
        ]
        if self.uses_query_key and not any(needs_all_heads):
            return query, key, value
        groups = heads // value.shape[1]
        repeated = None if key is None else key.repeat_interleave(groups, 1)
        return query, repeated, value.repeat_interleave(groups, 1)

    def _tell_of_embeddings(self) -> None:
        self._embedded = True
        if "embeddings" in self.acts_on:
            names = [type(method).__name__ for method in self.components() if "embeddings" in method.acts_on]
            warnings.warn(
                f"{' and '.join(names)} acts on embeddings, and its embed has not been called: below the first layer, "
                "hidden = position.embed(hidden, positions)",
                stacklevel=3,
            )

    def components(self, layer: int | None = None) -> tuple[PositionMethod, ...]:
        """The methods that this one is made of, or those that act in one layer: itself, unless it joins others."""
        return (self,)

    def depends_on_offsets_only(self) -> bool:
        """Whether attention depends on offsets alone, so that packed texts may have their row's positions."""
        return self.shift_invariant or not self.acts_in_attention()

    def check_layer(self, layer: int, name: str = "layer") -> None:
        """Raise an InputError that names the argument for a layer that the method was not built for."""
        if not 0 <= layer < self.model.num_layers:
            raise InputError(
                name,
                f"the method was built for {self.model.num_layers} layers, got layer {layer}, counted from 0; "
                "give build_position num_layers",
            )

    def check_axes(self, name: str, positions: PositionsLike, sizes: tuple[int, int] | None = None) -> None:
        """Raise an InputError that names the argument for positions (batch, n, axes) that the method does not take.

        ``sizes`` are the batch and n, if they are known. Numbers are looked at on the CPU only.
        """
        if isinstance(positions, Positions) or positions.dim() != 3:
            return
        strange = positions.is_complex() or positions.dtype is torch.bool
        if strange or (can_look(positions) and not positions.isfinite().all()):
            raise InputError(name, f"expected finite numbers, got {shown(positions)}")
        if sizes is not None and (positions.shape[0] not in (1, sizes[0]) or positions.shape[1] != sizes[1]):
            wanted = f"(1 or {sizes[0]}, {sizes[1]}, axes)"
            raise InputError(name, f"expected shape {wanted}, got {tuple(positions.shape)}")
        for method in self.components():
            if method.acts_on and method.num_axes != positions.shape[2]:
                takes = "takes positions (n,) or (batch, n)" + (
                    f" or (batch, n, {method.num_axes})" if method.num_axes else ""
                )
                hint = "; rope takes several axes with its option sections"
                raise InputError(name, f"{type(method).__name__} {takes}, got {tuple(positions.shape)}{hint}")

    def check_hidden(self, hidden: Tensor) -> None:
        """Raise an InputError for a layer's input of another width, for methods that read it."""
        if hidden.dim() != 3 or hidden.shape[2] != self.model.hidden_size:
            raise InputError(
                "hidden", f"expected (batch, n_q, hidden_size {self.model.hidden_size}), got {tuple(hidden.shape)}"
            )

    def reset_parameters(self) -> None:
        """Draw the initial values, through ``torch.nn.init`` only: loaders switch it off to keep loaded weights."""

    def embed(
        self, hidden: Float[Tensor, "batch n embedding_size"], positions: PositionsLike
    ) -> Float[Tensor, "batch n embedding_size"]:
        """Add position to the embeddings (batch, n, embedding_size). Models call this once, below layer 0.

        ``hidden`` is multiplied by ``embedding_scale`` before.
        """
        return hidden

    def vectors(
        self, positions: PositionsLike, device: torch.device | str | None = None
    ) -> Float[Tensor, "n width"] | Float[Tensor, "batch n width"] | None:
        """The vector that stands for each position, (n, width) or (batch, n, width); None if the method has none.

        These are the vectors before any norm or projection. All layers have the same.
        """
        return None

    def compute_shared(self, site: Site) -> Any:
        """Compute what all layers with a site's positions have in common; the hooks below find it in ``site.shared``.

        A model calls this for every pair of sequences in a forward (a funnel has several). The site has no layer.
        """
        return None

    def with_shared(self, site: Site) -> Site:
        """Return a site with what all of its layers share.

        It is computed once there, the tables of all layers at once, and otherwise by each layer for itself.
        """
        return replace(site, shared=self.compute_shared(site))

    def get_shared(self, site: Site) -> Any:
        """Return what :meth:`compute_shared` computes for a site: ``site.shared`` if it is there."""
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
        """Change projected query, key and value, each (batch, heads, n, head_dim), in every layer."""
        return query, key, value

    def terms(self, hidden: Float[Tensor, "batch n_q hidden_size"], site: Site) -> tuple[Term, ...]:
        """What position adds to scores and values; ``hidden`` (batch, n_q, hidden_size) is the queries' input."""
        return ()

    def content_terms(
        self, query: Float[Tensor, "batch heads n_q head_dim"], key: Float[Tensor, "batch _ _ head_dim"], site: Site
    ) -> tuple[Term, ...]:
        """Return terms that depend on the projected query (batch, heads, n_q, head_dim) or key.

        They are the query and key before ``transform_qkv``. After a key-value cache, ``key`` holds only the new keys,
        unless the method sets ``reads_keys``.
        """
        return ()

    def query_factor(
        self, query: Float[Tensor, "batch heads n_q head_dim"], site: Site
    ) -> Float[Tensor, "#batch #heads n_q 1"]:
        """Return the factor that ``transform_qkv`` multiplies the query by, (1 or batch, 1 or heads, n_q, 1).

        Only a method that ``scales_query`` has one. Methods that are joined with this one receive the query with this
        factor in ``content_terms``, so that all products with the query have it.
        """
        raise NotImplementedError

    def content_scale(self, site: Site) -> float:
        """The factor on query . key in the layer that calls, for terms that are to have the same."""
        return self.model.head_dim**-0.5 if site.scale is None else site.scale

    def curve(
        self, offsets: Real[Tensor, "*offsets"] | Sequence[float], *, layer: int = 0
    ) -> Float[Tensor, "heads *offsets"] | None:
        """What each head adds to a score at each offset, (heads, \\*offsets); None if the method has no such curve.

        Offsets have any shape: those between explicit positions are a matrix.
        The curve has the precision of the parameters, and at least that of float32: bfloat16 has no number for the
        offset 1,001. Parameters that are read from a table stay as they are.
        """
        return None

    def kernel_parameters(self) -> tuple[nn.Parameter, ...]:
        """The method's own parameters that are kernels; a training may give them a learning rate of their own."""
        return ()


def _noted(embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a method's ``embed`` with a note that it has been called."""

    @functools.wraps(embed)
    def noted(self: PositionMethod, hidden: Tensor, positions: PositionsLike) -> Tensor:
        if not torch.compiler.is_compiling():
            self._embedded = True
        self.check_axes("positions", positions)
        return embed(self, hidden, positions)

    return noted


class OffsetFunction(PositionMethod):
    """A method whose whole effect on a score is one number per head and offset: its ``curve``."""

    shift_invariant = True

    shares_curve: bool = False
    """Whether all layers have the same curve. They then share its terms."""

    def reach(self, *, layer: int = 0) -> int | None:
        """An absolute offset beyond which the curve is constant in each direction; None if it never settles."""
        return None

    def reach_per_layer(self) -> Sequence[int | None]:
        """The reach of every layer. A method that can computes all of them at once."""
        return [self.reach(layer=layer) for layer in range(self.model.num_layers)]

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        raise NotImplementedError

    def curve_per_layer(self, offsets: Tensor) -> Sequence[Tensor]:
        """The curve of every layer, (heads, offsets) each. A method that can computes all of them at once."""
        return [self.curve(offsets, layer=layer) for layer in range(self.model.num_layers)]

    def compute_shared(self, site: Site) -> Sequence[tuple[Term, ...]] | None:
        """The terms of every layer; None if each pair of tokens has a number of its own, which takes much memory."""
        if self.shares_curve:
            return [self.terms_at(replace(site, layer=0))] * self.model.num_layers
        spans = [site_span(site, reach) for reach in self.reach_per_layer()]
        known = [span for span in spans if span is not None]
        if len(known) < len(spans):
            return None
        first, end = min(low for low, _ in known), max(high for _, high in known) + 1
        curves = self.curve_per_layer(torch.arange(first, end, device=self._like.device))
        return [
            (OffsetBias(curve if (low, high + 1) == (first, end) else curve[:, low - first : high + 1 - first], low),)
            for curve, (low, high) in zip(curves, known, strict=True)
        ]

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        terms: tuple[Term, ...] = self.terms_at(site) if site.shared is None else site.shared[site.layer]
        return terms

    def terms_at(self, site: Site) -> tuple[Term, ...]:
        """The terms of one layer; they do not depend on the hidden states.

        Raises:
            TypeError: for fractional positions, if the method does not take them.
        """
        device = self._like.device
        span = site_span(site, self.reach(layer=site.layer))
        if span is not None:
            first, last = span
            return (OffsetBias(self.curve(torch.arange(first, last + 1, device=device), layer=site.layer), first),)
        # Explicit positions can be anywhere: evaluate the curve at the offsets that occur.
        query_values, key_values = (position_values(at, device) for at in (site.query_positions, site.key_positions))
        offsets = offsets_between(query_values, key_values)
        if offsets.is_floating_point() and not self.accepts_fractional:
            raise TypeError(f"{type(self).__name__}: needs whole positions, got fractional ones")
        scores = self.curve(offsets, layer=site.layer)
        return (DenseBias(scores.transpose(0, 1) if offsets.dim() == 3 else scores.unsqueeze(0)),)


def offset_span(
    query_positions: PositionsLike, key_positions: PositionsLike, reach: int | None
) -> tuple[int, int] | None:
    """The first and last offset that a table must cover, or None if only the data can tell.

    Beyond ``reach`` a curve is constant, so the table ends there. The span holds at least one offset.
    """
    span = offset_range(query_positions, key_positions)
    if span is not None:
        first, last = span
        if reach is not None and not are_numbers(first, last):
            # A program for any length has the same table for all.
            return -reach, reach
        if reach is not None:
            first, last = (max(-reach, min(reach, end)) for end in (first, last))
        return first, last
    whole = not any(isinstance(p, Tensor) and p.is_floating_point() for p in (query_positions, key_positions))
    return (-reach, reach) if reach is not None and whole else None


def site_span(site: Site, reach: int | None) -> tuple[int, int] | None:
    """The first and last offset that a table for a site must cover, as :func:`offset_span` and by its bounds."""
    furthest = None if site.position_stop is None else max(site.position_stop - 1 - site.min_position, 0)
    known = [bound for bound in (reach, furthest) if bound is not None]
    return offset_span(site.query_positions, site.key_positions, min(known, default=None))


def as_offsets(offsets: Tensor | Sequence[float], like: Tensor) -> Tensor:
    """Offsets as a tensor on the device of ``like``."""
    return torch.as_tensor(offsets, device=like.device)


def whole_offsets(offsets: Tensor | Sequence[float], like: Tensor) -> Tensor:
    """Offsets as int64, for methods that are defined on whole offsets only.

    Raises:
        TypeError: for a fractional offset.
    """
    values = as_offsets(offsets, like)
    whole = values.long()
    if values.is_floating_point() and not bool((whole == values).all()):
        raise TypeError("offsets: this method is defined on whole offsets only, got fractional ones")
    return whole


def float_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype to evaluate a function of offsets in: the parameter's, but never below float32.

    In half precision offsets beyond 256 (bfloat16) or 2048 (float16) are no longer whole numbers.
    """
    return parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32


def table_rows(
    positions: PositionsLike,
    rows: int,
    name: str,
    device: torch.device,
    least: int = 0,
) -> Tensor:
    """Return the row indices of positions in a table of ``rows`` positions, (n,) or (batch, n).

    ``least`` is what no position is below: that of a pooled [CLS], which has the first row.

    Raises:
        PositionRangeError: if a position has no row. Explicit positions are checked on the CPU only. Elsewhere, and in
            compiled code, reading them would stall the device, so torch's own index check reports them.
        TypeError: for fractional positions.
    """
    if isinstance(positions, Positions):
        # The [CLS] of a pooled sequence is one stride before the token at 1, and nothing precedes it.
        first = 0 if positions.start == 1 - positions.stride else positions.start
        if positions.length > 0 and (first < 0 or positions.last >= rows):
            raise out_of_range(name, rows, first if first < 0 else positions.last)
        return position_values(positions, device).clamp(min=0)
    if positions.is_floating_point():
        raise TypeError(f"{name}: needs whole positions, got {positions.dtype}")
    positions = position_values(positions, device)
    if can_look(positions) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < least or high >= rows:
            raise out_of_range(name, rows, low if low < 0 else high)
    elif not least:
        # A negative index would silently count from the end.
        return positions.masked_fill(positions < 0, rows)
    return positions.clamp(min=0) if least else positions


def out_of_range(name: str, rows: int, position: int) -> PositionRangeError:
    """Return the error for a position that a table of ``rows`` positions lacks."""
    covered = f"{name} covers positions 0 to {rows - 1} (max_length {rows}), got position {position}"
    return PositionRangeError(f"{covered}; raise max_length or choose a method that extrapolates")


def position_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters of position by name: those of its methods, and the sinks of its attention."""
    methods = [module for module in model.modules() if isinstance(module, PositionMethod)]
    own = {id(parameter) for method in methods for parameter in method.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in own or name.endswith(".sinks")
    }
