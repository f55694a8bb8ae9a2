"""The names by which transformers finds our attention functions: each with our masks, or with transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from .masks import of_growing_caches

NAME = "whereformer"
"""The name of the attention implementation, of each stack's position submodule, and of the configuration's field."""

OWN_MASKS = {"eager": eager_mask, "sdpa": sdpa_mask}
"""The masks of transformers' implementations, for models that compute with them; they are matrices."""


def register(name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let transformers call an attention function by a name, with our masks, and by two others with its own."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    for own, function in OWN_MASKS.items():
        AttentionInterface.register(with_masks(name, own), _only_masked(attend) if own == "eager" else attend)
        AttentionMaskInterface.register(with_masks(name, own), of_growing_caches(function))


def with_masks(name: str, own: str | None) -> str:
    """Return the name by which a function gets transformers' own masks; with None, ours."""
    return name if own is None else f"{name}_{own}"


def is_ours(implementation: str | None) -> bool:
    """Whether an attention implementation is one of this library."""
    return implementation is not None and implementation.startswith(NAME)


def _only_masked(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the rule of eager attention: nothing but the mask limits it, whatever a layer says."""

    def attend_eagerly(*args: Any, **options: Any) -> Any:
        return attend(*args, **{**options, "is_causal": False})

    return attend_eagerly
