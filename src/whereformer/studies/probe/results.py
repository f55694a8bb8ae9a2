"""The contents of ``results.json`` for probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...lab.json_files import check_that
from ...lab.score import Cannot
from ...lab.store import RunResults
from .settings import ProbeSettings
from .tasks import TASKS

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

    def check(self) -> None:
        lengths = next(iter(self.guesses.values()), {}).keys()
        for task, guesses in self.guesses.items():
            check_that(task in TASKS, f"guesses.{task}", f"a task out of {', '.join(TASKS)}")
            check_that(guesses.keys() == lengths and 0 not in lengths, f"guesses.{task}", "a guess at each length")
            check_that(self.settings.length in guesses, f"guesses.{task}", "a guess at the length of training")
            check_that(all(0 <= guess <= 1 for guess in guesses.values()), f"guesses.{task}", "shares from 0 to 1")
        check_that(self.runs.keys() <= self.guesses.keys(), "runs", "tasks with guesses")
        for key, run in self.each():
            if isinstance(run, Run):
                where = f"runs.{'.'.join(map(str, key))}"
                check_that(run.scores.keys() == lengths, where, "a score at each length")
                scores = [score for score in run.scores.values() if isinstance(score, Score)]
                ok = all(0 <= score.accuracy <= 1 and score.error >= 0 for score in scores)
                check_that(ok, where, "accuracies from 0 to 1 and errors of at least 0")

    def sheets(self) -> Sequence[Sheet]:
        from .report import sheets

        return sheets(self)

    def sentences(self) -> Sequence[str]:
        from .judgment import about_seeds, tables, verdict

        return [*verdict(tables(self)), about_seeds(self)]

    def report(self) -> str:
        from .report import build_report

        return build_report(self)
