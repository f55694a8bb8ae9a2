"""Spread: the median and range of a number over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median over seeds with its range, or the reason why there is none."""

    median: float | None
    low: float | None = None
    high: float | None = None
    why_not: str = ""

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of ``values``, one per seed."""
        return Spread(statistics.median(values), min(values), max(values))
