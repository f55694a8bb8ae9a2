"""Checks of settings that all experiments share."""

from __future__ import annotations

from typing import Any

from ..errors import InputError


def check_range(settings: Any, **bounds: tuple[float, float]) -> None:
    """Check that every named number is None or lies within its bounds, ends included.

    Raises:
        InputError: if one does not; it names the field, the bounds and the value.
    """
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            expected = f"at least {low}" if high == float("inf") else f"{low} to {high}"
            raise InputError(name, f"expected {expected}, got {value}")


def listed(field: str, text: str) -> tuple[str, ...]:
    """Split a comma-separated list into its distinct parts, without spaces.

    Raises:
        InputError: if there are none.
    """
    parts = tuple(dict.fromkeys("".join(part.split()) for part in text.split(",") if part.strip()))
    if not parts:
        raise InputError(field, "expected at least one, got none")
    return parts
