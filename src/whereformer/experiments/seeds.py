"""Numbers that were measured with several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median over seeds with its range, or why there is no number."""

    median: float | None
    low: float | None = None
    high: float | None = None
    why_not: str = ""

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """From one number a seed."""
        return Spread(statistics.median(values), min(values), max(values))
