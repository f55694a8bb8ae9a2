"""Checks that configurations and models share. Their errors name the field or argument that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from ..errors import InputError


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise an InputError that names the argument unless it has the expected shape."""
    if tensor.shape != expected:
        raise InputError(name, f"expected shape {tuple(expected)}, got {tuple(tensor.shape)}")


def check_least(config: Any, least: Mapping[str, int]) -> None:
    """Raise an InputError for a field that is not None and below its least value."""
    for name, bound in least.items():
        value = getattr(config, name)
        # "value < bound" would let NaN pass.
        if value is not None and not value >= bound:
            raise InputError(name, f"expected at least {bound}, got {value}")


def check_choices(config: Any, choices: Mapping[str, Collection[str]]) -> None:
    """Raise an InputError for a field whose value is not among the allowed ones."""
    for name, known in choices.items():
        if getattr(config, name) not in known:
            expected = " or ".join(repr(choice) for choice in known)
            raise InputError(name, f"expected {expected}, got {getattr(config, name)!r}")


def check_activation(config: Any, name: str) -> None:
    """Raise an InputError for a field that does not name an activation of transformers."""
    if getattr(config, name) not in ACT2FN:
        raise InputError(name, f"expected one of {', '.join(ACT2FN)}, got {getattr(config, name)!r}")


def width_of_heads(config: Any) -> int:
    """Return the width of one head: ``head_dim`` if given, else an equal share of ``hidden_size``.

    Raises:
        InputError: if the heads do not divide ``hidden_size``.
    """
    if config.head_dim is not None:
        return config.head_dim
    heads, width = config.num_attention_heads, config.hidden_size
    if width % heads:
        raise InputError("num_attention_heads", f"{heads} heads do not divide hidden_size {width}")
    return width // heads
