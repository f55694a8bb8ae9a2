"""The names by which transformers finds our attention functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

NAME = "whereformer"
"""The name of the attention implementation, of each stack's position submodule, and of the configuration's field."""


def register(name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let transformers call an attention function by a name, and our mask function with it."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def is_ours(implementation: str | None) -> bool:
    """Whether an attention implementation is one of this library."""
    return implementation is not None and implementation.startswith(NAME)
