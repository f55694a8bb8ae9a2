"""``Site``: one attention call's positions, masks and layer, and the results that layers share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import InputError, short_repr
from ..kernels.make_call import SiteOptions, Window
from ..kernels.terms import Positions, PositionsLike


@dataclass(frozen=True, eq=False)
class Site:
    """One attention call's positions, masks and layer, and the results that layers share.

    Args:
        query_positions: positions of the queries: affine, (n,) or (batch, n). For rope with sections they may also be
            (batch, n, axes); causality and windows then use the index of each token in its row.
        key_positions: positions of the keys, in the same forms.
        layer: the index of the attention layer, from 0; a shared layer counts once per pass.
        shared: the result of :meth:`PositionMethod.compute_shared` for this site. If None, each hook computes it.
        key_mask: (batch, n_k) bool, True = may be attended. If None, all keys may be attended.
        causal: whether keys at positions after the query's are masked. If None, the method decides, by the ``causal``
            that it was built with.
        window: how far before and after itself a query attends, as for :func:`whereformer.attention`.
        scale: the factor on query . key in this layer; None: head_dim ** -0.5.
        query_documents, key_documents: (batch, n_q) and (batch, n_k), the document ids of packed rows: a query sees
            only the keys of the same document. If None, each row is one document.
        query_segments, key_segments: (batch, n_q) and (batch, n_k), token types, for models whose scores use them.
        query_starts, key_starts: (batch, n_q) and (batch, n_k) bool, True = the first token of a document that is not
            padding; needed where a model has both documents and segments.
        new_key_positions: positions of the keys that ``transform_qkv`` receives, if a cache holds the keys before them.
            If None, it receives all keys.
        position_stop: a bound that all positions stay below. If None, no bound is known for positions in tensors.
        min_position: a bound that no position is below: negative where pooling moves [CLS] to the left.
        num_dropped_keys: the number of tokens, without padding, before the first key, (batch or 1, 1) or one number for
            all rows. A sliding cache has dropped their keys, but methods that count keys still count them.

    Raises:
        InputError: for positions in another form.
    """

    query_positions: PositionsLike
    key_positions: PositionsLike
    layer: int = 0
    shared: Any = None
    key_mask: Tensor | None = None
    causal: bool | None = None
    window: Window = None
    scale: float | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    new_key_positions: PositionsLike | None = None
    position_stop: int | None = None
    min_position: int = 0
    num_dropped_keys: Tensor | int = 0

    def __post_init__(self) -> None:
        for name in ("query_positions", "key_positions"):
            if not isinstance(positions := getattr(self, name), Positions | Tensor):
                reason = f"expected Positions(start, stride, length) or a tensor, got {short_repr(positions)}"
                raise InputError(name, reason)

    @classmethod
    def self_attention(
        cls,
        positions: PositionsLike,
        *,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        starts: Tensor | None = None,
        **fields: Any,
    ) -> Site:
        """Return the site of tokens that attend to one another; ``fields`` are other fields of the site."""
        queries: dict[str, Any] = {"query_documents": documents, "query_segments": segments, "query_starts": starts}
        keys: dict[str, Any] = {"key_documents": documents, "key_segments": segments, "key_starts": starts}
        return cls(positions, positions, **queries, **keys, **fields)

    def at_layer(self, layer: int) -> Site:
        """Return the same site in another layer, without the constructor's checks."""
        site = object.__new__(type(self))
        vars(site).update(vars(self), layer=layer)
        return site

    def with_keys_of(self, key_site: Site) -> Site:
        """Return the site at which the queries of this site attend to the keys of ``key_site``."""
        names = ("key_positions", "key_mask", "key_documents", "key_segments", "key_starts")
        return replace(self, **{name: getattr(key_site, name) for name in names})

    @property
    def transformed_key_positions(self) -> PositionsLike:
        """Positions of the keys that ``transform_qkv`` receives: the new ones if a cache holds the keys before them."""
        return self.key_positions if self.new_key_positions is None else self.new_key_positions

    def options(self, query: Tensor | None) -> SiteOptions:
        """Return the site as keyword arguments of :func:`whereformer.attention`; without a query, scale is None."""
        has_axes = any(
            isinstance(positions, Tensor) and positions.dim() == 3
            for positions in (self.query_positions, self.key_positions)
        )
        return {
            "query_positions": None if has_axes else self.query_positions,
            "key_positions": None if has_axes else self.key_positions,
            "key_mask": self.key_mask,
            "causal": bool(self.causal),
            "window": self.window,
            "scale": None if query is None else self.scale,
            "query_documents": self.query_documents,
            "key_documents": self.key_documents,
        }
