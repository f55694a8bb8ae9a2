"""Checks of one value: its kind, its range, its choices. Errors say which value was expected, and which one came."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from .errors import InputError, short_repr, suggest

KINDS: dict[type, tuple[type, str]] = {
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
    Path: (Path, "a path"),
}
"""For each kind of value, the class that values must have, and its name in errors."""
LARGE = 2**12
"""An upper limit above this number is mentioned only in errors about values that exceed it."""


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise an InputError if a value is not of a kind. True and False are not numbers, and integers are numbers too."""
    if not isinstance(value, KINDS.get(kind, (kind,))[0]) or isinstance(value, bool) != (kind is bool):
        raise kind_error(name, value, kind)


def kind_error(name: str, value: object, kind: type) -> InputError:
    """Return the error about a value that is not of a kind."""
    return InputError(name, f"expected {KINDS[kind][1] if kind in KINDS else kind.__name__}, got {short_repr(value)}")


def check_range(name: str, value: Any, low: float, high: float = math.inf, *, ends: bool = True) -> None:
    """Raise an InputError if a number, or NaN, is not between two limits; ``ends``: whether it may equal them."""
    if (ends and low <= value <= high) or low < value < high:
        return
    if not ends:
        expected = f"a number above {low:g} and below {high:g}"
    elif high > LARGE:
        expected = f"at most {high:.10g}" if value > high else f"at least {low:.10g}"
    else:
        expected = f"{low:.10g} to {high:.10g}"
    raise InputError(name, f"expected {expected}, got {short_repr(value)}")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise an InputError if a value is not one of a few; it suggests a choice with a similar name."""
    choices = [*choices]  # a list, so that a value without a hash can be looked up too
    if value not in choices:
        known = [*map(str, choices)]
        hint = suggest(str(value), known)
        raise InputError(name, f"expected one of {', '.join(known)}, got {short_repr(value)}{hint}")
