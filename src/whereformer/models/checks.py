"""Checks that configurations and models share. Their errors name the field or argument that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ..errors import InputError, shown
from ..kernels.tracing import can_look


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise an InputError that names the argument unless it has the expected shape."""
    if tensor.shape != expected:
        raise InputError(name, f"expected shape {tuple(expected)}, got {tuple(tensor.shape)}")


def check_positions(name: str, positions: Tensor, batch: int, length: int) -> None:
    """Raise an InputError that names the argument unless there is a position for every token, of at most MOST_IDS.

    Numbers are looked at on the CPU only; elsewhere, and in compiled code, that would stall the device.
    """
    if positions.shape not in ((length,), (1, length), (batch, length)):
        raise InputError(name, f"expected shape {(length,)} or {(batch, length)}, got {tuple(positions.shape)}")
    if positions.is_complex() or not can_look(positions) or not positions.numel():
        return
    # torch cannot compare the wider unsigned numbers.
    for value in torch.stack(positions.double().aminmax()).tolist():
        if not abs(value) <= MOST_IDS:  # NaN too
            raise InputError(name, f"expected numbers from -{MOST_IDS} to {MOST_IDS}, got {value:g}")


MOST_WIDTH = 2**20
"""The largest width and number of heads. Beyond it, torch could not hold the number of a weight's bytes."""
MOST_IDS = 2**31 - 1
"""The largest number of tokens, positions or types, which 32 bits still count."""

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", dict: "a dictionary"}


def check_kinds(config: Any, extra: Mapping[str, Any]) -> None:
    """Raise an InputError for a field of one of our configurations whose value is of another kind than declared.

    A configuration may come from a stranger's config.json, where anything can stand anywhere.

    Args:
        config: the configuration. A field that may be None, or is by default, passes.
        extra: entries that are no fields. transformers makes them attributes, so they must not hide a method.
    """
    own = [each for each in type(config).__mro__ if each.__module__.partition(".")[0] == __name__.partition(".")[0]]
    for base in own:
        for name, hint in get_annotations(base, eval_str=True).items():
            declared = get_args(hint)[0] if isinstance(hint, UnionType) else hint
            kind = get_origin(declared) or declared
            value = getattr(config, name)
            if kind not in _KINDS or (value is None and (vars(base)[name] is None or NoneType in get_args(hint))):
                continue
            if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (
                kind is bool
            ):
                raise InputError(name, f"expected {_KINDS[kind]}, got {shown(value)}")
            if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
                raise InputError(name, f"expected text as keys, got {shown(value)}")
    for name in extra:
        hides = name == "attribute_map" or callable(getattr(type(config), name, None))
        if hides or not name.isidentifier():
            raise InputError("config", f"it has no field {shown(name)}")


def check_bounds(config: Any, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raise an InputError for a field that is not None and below its least or above its greatest value."""
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        # "value < least" would let NaN pass.
        if value is not None and not value >= least:
            raise InputError(name, f"expected at least {least}, got {shown(value)}")
        if value is not None and not value <= most:
            raise InputError(name, f"expected at most {most}, got {shown(value)}")


def check_choices(config: Any, choices: Mapping[str, Collection[str]]) -> None:
    """Raise an InputError for a field whose value is not among the allowed ones."""
    for name, known in choices.items():
        if getattr(config, name) not in known:
            expected = " or ".join(repr(choice) for choice in known)
            raise InputError(name, f"expected {expected}, got {shown(getattr(config, name))}")


def check_activation(config: Any, name: str) -> None:
    """Raise an InputError for a field that does not name an activation of transformers."""
    if getattr(config, name) not in ACT2FN:
        raise InputError(name, f"expected one of {', '.join(ACT2FN)}, got {shown(getattr(config, name))}")


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
