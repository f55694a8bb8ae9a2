"""What a position method gains over a baseline, as the TISA paper counts it (Wennberg & Henter, 2021, Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Gain:
    """The gain of the best of some models over a baseline, which are judged with several seeds by one metric.

    Args:
        baseline: the baseline's scores in percent, one per seed.
        others: those of the other models, at least of one.
    """

    baseline: Sequence[float]
    others: Sequence[Sequence[float]]

    @property
    def points(self) -> float:
        """The largest difference of medians, in points; negative if everything is worse than the baseline."""
        return max(map(median, self.others)) - median(self.baseline)

    @property
    def removed(self) -> float | None:
        """The share of the baseline's errors that it removes, in percent; None if the baseline has none.

        From 57.2 to 58.5 is a gain of 1.3 points, 3.0% of the errors.
        """
        errors = 100 - median(self.baseline)
        return 100 * self.points / errors if errors else None

    @property
    def clear(self) -> bool:
        """Whether every seed of the best model is better than every seed of the baseline; never with one seed."""
        best = max(self.others, key=median)
        return len(self.baseline) > 1 and min(best) > max(self.baseline)
