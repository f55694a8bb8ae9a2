"""The contents of ``results.json`` for probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...lab.score import Cannot
from ...lab.store import RunResults
from .settings import ProbeSettings

if TYPE_CHECKING:
    from ...lab.sheet import Sheet


@dataclass(frozen=True)
class Score:
    """The share of answers that are right at one length, how far it is ahead of guessing without positions on the same
    rows, and the standard error of that over the rows.
    """

    accuracy: float
    ahead: float
    error: float


@dataclass(frozen=True)
class Run:
    """One trained model: the seconds that training took, and its score at each length in symbols."""

    seconds: float
    scores: dict[int, Score | Cannot]


@dataclass(frozen=True)
class Failed:
    """The reason why a training ended without a model."""

    failed: str


@dataclass(frozen=True)
class ProbeResults(RunResults):
    """The results of probes, finished or so far.

    Args:
        settings: the settings that all runs share.
        runs: the finished runs, by task, method and seed.
        guesses: by task and length, the accuracy of the best guess without positions.
    """

    FORMAT = "probe 1"
    KEYS = 3

    settings: ProbeSettings
    runs: dict[str, dict[str, dict[int, Run | Failed]]]
    guesses: dict[str, dict[int, float]]

    def sheets(self) -> Sequence[Sheet]:
        from .report import sheets

        return sheets(self)

    def sentences(self) -> Sequence[str]:
        from .judgment import about_seeds, tables, verdict

        return [*verdict(tables(self)), about_seeds(self)]

    def report(self) -> str:
        from .report import build_report

        return build_report(self)
