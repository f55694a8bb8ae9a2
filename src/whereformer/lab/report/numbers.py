"""Format numbers for reports."""

from __future__ import annotations

import math

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def plain(number: float) -> str:
    """Format a number as short as possible, with up to six digits and a real minus sign."""
    return f"{number:z.6g}".replace("-", MINUS)


def signed(number: float) -> str:
    """Format a number with its sign, as offsets are written; 0 has none."""
    return f"{number:+g}".replace("-", MINUS) if number else "0"


def decimals(number: float | None, digits: int = 3) -> str:
    """Format a number with a fixed number of decimals; a dash if there is none or it is not finite."""
    if number is None or not math.isfinite(number):
        return DASH
    return f"{number:z.{digits}f}".replace("-", MINUS)


def percent(share: float | None, digits: int = 0) -> str:
    """Format a share in percent; a dash if there is none or it is not finite."""
    if share is None or not math.isfinite(share):
        return DASH
    return f"{share:z.{digits}%}".replace("-", MINUS)
