"""Lists that are one word of a benchmark's options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from whereformer.errors import InputError, short_repr


def listed(field: str, text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """Split a comma-separated list into its distinct parts.

    Raises:
        InputError: if there are none, or one is not among ``known``, if that is given.
    """
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise InputError(field, "expected at least one, got none")
    for part in parts:
        if known is not None and part not in known:
            raise InputError(field, f"expected {', '.join(known)}, got {part!r}")
    return parts


def listed_numbers(field: str, text: str, low: int, high: int) -> list[int]:
    """Split a comma-separated list of whole numbers within bounds, ends included, into the distinct ones, in order.

    Raises:
        InputError: if there are none, or one is something else.
    """
    found = []
    for part in listed(field, text):
        if not re.fullmatch("[0-9]{1,18}", part) or not low <= int(part) <= high:
            raise InputError(field, f"expected numbers from {low} to {high} with commas, got {short_repr(part)}")
        found.append(int(part))
    return list(dict.fromkeys(found))
