"""The names by which transformers finds our attention functions: each with our masks, or with matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

NAME = "whereformer"
"""The name of the attention implementation, of each stack's position submodule, and of the configuration's field."""

MATRICES = "_eager"
"""The end of the name of an implementation with masks as matrices, for models with parts that compute with them."""


def register(name: str, attend: Callable[..., Any], mask: Callable[..., Any], matrix: Callable[..., Any]) -> None:
    """Let transformers call an attention function by a name, with our masks, and by another one with matrices."""

    def attend_eagerly(*arguments: Any, **options: Any) -> Any:
        """Attend where nothing but the mask limits attention."""
        return attend(*arguments, **{**options, "is_causal": False})

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(name + MATRICES, attend_eagerly)
    AttentionMaskInterface.register(name + MATRICES, matrix)


def is_ours(implementation: str | None) -> bool:
    """Whether an attention implementation is one of this library."""
    return implementation is not None and implementation.startswith(NAME)
