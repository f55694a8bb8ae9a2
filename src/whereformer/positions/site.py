"""``Site``, where attention takes place: which tokens attend to which, in which layer, and what its layers share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..kernels.call import CallOptions, Window
from ..kernels.terms import PositionsLike


@dataclass(frozen=True, eq=False)
class Site:
    """Where attention takes place: which tokens attend to which, in which layer, and what its layers share.

    Args:
        queries: positions of the tokens that attend: affine, (n,) or (batch, n); for rope with sections also
            (batch, n, axes), beside which causality and windows count the tokens in their rows.
        keys: positions of the tokens that they attend to.
        layer: the attention layer's number, from 0; a shared layer counts once per pass.
        shared: what :meth:`Position.compute_shared` returned for this site; None if the hooks have to compute it.
        key_mask: (batch, n_k) bool, True = may be attended; None: all may.
        causal: whether keys at positions after the query's are masked; None: if the method was built so.
        window: how far before and after itself a query attends, as for :func:`whereformer.attention`.
        scale: the factor on query . key in this layer; None: head_dim ** -0.5.
        query_documents, key_documents: (batch, n_q) and (batch, n_k), the documents of packed rows: a query sees the
            keys of its own document. None: each row is one document.
        query_segments, key_segments: (batch, n_q) and (batch, n_k) token types, for models whose scores depend on them.
        query_starts, key_starts: (batch, n_q) and (batch, n_k), True = the first real token of its document, where
            documents and segments ask for it.
        new_keys: positions of the keys that ``rotate`` gets, if the others wait in a cache; None: all.
        end: what no position reaches; None: not known of positions in tensors.
        least: what no position is below, such as those of pooled [CLS].
        dropped: the number of real tokens before the first key, (batch or 1, 1) or the same for all rows: a cache that
            slides has dropped their keys. Methods that count keys count them.
    """

    queries: PositionsLike
    keys: PositionsLike
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
    new_keys: PositionsLike | None = None
    end: int | None = None
    least: int = 0
    dropped: Tensor | int = 0

    @classmethod
    def within(
        cls,
        at: PositionsLike,
        *,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        starts: Tensor | None = None,
        **more: Any,
    ) -> Site:
        """Return where tokens attend to one another: they are queries and keys; ``more`` are other fields."""
        queries: dict[str, Any] = {"query_documents": documents, "query_segments": segments, "query_starts": starts}
        return cls(at, at, **queries, key_documents=documents, key_segments=segments, key_starts=starts, **more)

    def with_keys_of(self, other: Site) -> Site:
        """Return where these queries attend to the keys of another site."""
        names = ("keys", "key_mask", "key_documents", "key_segments", "key_starts")
        return replace(self, **{name: getattr(other, name) for name in names})

    @property
    def rotated_keys(self) -> PositionsLike:
        """Positions of the keys that ``rotate`` gets."""
        return self.keys if self.new_keys is None else self.new_keys

    def options(self, query: Tensor | None) -> CallOptions:
        """Return the site as keyword arguments of :func:`whereformer.attention`, which takes no scale without a
        query."""
        has_axes = any(isinstance(at, Tensor) and at.dim() == 3 for at in (self.queries, self.keys))
        return {
            "query_positions": None if has_axes else self.queries,
            "key_positions": None if has_axes else self.keys,
            "key_mask": self.key_mask,
            "causal": bool(self.causal),
            "window": self.window,
            "scale": None if query is None else self.scale,
            "query_documents": self.query_documents,
            "key_documents": self.key_documents,
        }
