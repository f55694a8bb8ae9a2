"""Checks that the settings of all experiments share."""

from __future__ import annotations

from typing import Any

from ..errors import InputError


def check_range(settings: Any, **bounds: tuple[float, float]) -> None:
    """Raise unless every named number that is not None lies within its bounds, ends included.

    Raises:
        InputError: naming the field, what it takes and what it got.
    """
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            expected = f"at least {low}" if high == float("inf") else f"{low} to {high}"
            raise InputError(name, f"expected {expected}, got {value}")


def listed(field: str, text: str) -> tuple[str, ...]:
    """The different parts of a list with commas.

    Raises:
        InputError: if there is none.
    """
    parts = tuple(dict.fromkeys("".join(part.split()) for part in text.split(",") if part.strip()))
    if not parts:
        raise InputError(field, "expected at least one, got none")
    return parts
