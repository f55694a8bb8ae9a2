"""Stores keys in a cache after the position method has rotated them, so that each key is rotated once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import DynamicCache

from ...kernels import Positions
from ...positions import PositionMethod, Site


def can_cache_rotated_keys(position: PositionMethod) -> bool:
    """Return whether the keys of a method can be cached after ``transform_qkv``.

    The method must change keys in a way that depends only on offsets, and must neither read keys nor change values.
    """
    changes_keys = "keys" in position.acts_on and "values" not in position.acts_on
    return changes_keys and position.depends_on_offsets_only() and not position.reads_keys


class RotatingCache(DynamicCache):
    """A view of a model's cache that rotates a layer's new keys before it stores them.

    It shares all state with the cache, whose keys may then be reordered, cropped or dropped, as in a model that rotates
    keys itself. The position of a key is the number of keys that were stored before it.

    Args:
        cache: the model's cache.
        position: the attached method.
        make_site: returns the site of new tokens, with the results that layers share, for their ``Positions``.
        layer: the number of the layer, for the method.
    """

    __slots__ = ("layer", "make_site", "new_key", "position")

    def __init__(
        self, cache: DynamicCache, position: PositionMethod, make_site: Callable[[Positions], Site], layer: int
    ) -> None:
        object.__setattr__(self, "__dict__", vars(cache))
        self.position, self.make_site, self.layer = position, make_site, layer
        self.new_key: Tensor | None = None
        """The layer's new keys before the rotation, (batch, key_heads, n, head_dim); None before ``update``."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        positions = Positions(self.get_seq_length(layer_idx), 1, key_states.shape[2])
        self.new_key = key_states
        site = self.make_site(positions).at_layer(self.layer)
        _, rotated, _ = self.position.transform_qkv(key_states, key_states, value_states, site)
        return super().update(rotated, value_states, layer_idx, *args, **kwargs)
