"""How reports write numbers."""

from __future__ import annotations

import math

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def plain(number: float) -> str:
    """As short as it can be, with a real minus sign."""
    return f"{number:z.6g}".replace("-", MINUS)


def signed(number: float) -> str:
    """The same with its sign, as offsets have it."""
    return f"{number:+g}".replace("-", MINUS) if number else "0"


def decimals(number: float | None, digits: int = 3) -> str:
    """A number of fixed digits; a dash for none."""
    if number is None or not math.isfinite(number):
        return DASH
    return f"{number:z.{digits}f}".replace("-", MINUS)


def percent(share: float | None, digits: int = 0) -> str:
    """A share in percent; a dash for none."""
    if share is None or not math.isfinite(share):
        return DASH
    return f"{share:z.{digits}%}".replace("-", MINUS)
