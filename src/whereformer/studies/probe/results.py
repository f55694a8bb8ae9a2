"""The contents of ``results.json`` for probes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...lab.results import Results, check_that, refuse_other_settings
from .settings import Sizes
from .tasks import TASKS


@dataclass(frozen=True)
class ProbeSettings(Sizes):
    """The settings that all runs in a folder share.

    Args:
        device: the kind of device, such as "cpu".
    """

    device: str = "cpu"


@dataclass(frozen=True)
class Score:
    """How many answers are right at one length.

    Args:
        accuracy: their share, from 0 to 1.
        ahead: the accuracy minus that of guessing without positions, on the same rows.
        error: the standard error of ``ahead`` over the rows.
    """

    accuracy: float
    ahead: float
    error: float


@dataclass(frozen=True)
class Cannot:
    """The reason why a method has no score at one length."""

    cannot: str


@dataclass(frozen=True)
class Run:
    """One trained model: the seconds that training took, and its score at each length in symbols."""

    seconds: float
    scores: dict[int, Score | Cannot]


@dataclass(frozen=True)
class Failed:
    """The reason why a training ended without a model."""

    failed: str


Runs = dict[str, dict[str, dict[int, Run | Failed]]]
"""The finished runs by task, method and seed."""


@dataclass(frozen=True)
class ProbeResults(Results):
    """The results of probes, finished or so far.

    Args:
        settings: the settings that all runs share.
        runs: the finished runs, by task, method and seed.
        guesses: by task and length, the accuracy of the best guess without positions.
    """

    FORMAT = "probe 1"

    settings: ProbeSettings
    runs: Runs
    guesses: dict[str, dict[int, float]]

    def check(self) -> None:
        lengths = next(iter(self.guesses.values()), {}).keys()
        for task, guesses in self.guesses.items():
            check_that(task in TASKS, f"guesses.{task}", f"a task out of {', '.join(TASKS)}")
            check_that(guesses.keys() == lengths and 0 not in lengths, f"guesses.{task}", "a guess at each length")
            check_that(self.settings.length in guesses, f"guesses.{task}", "a guess at the length of training")
            check_that(all(0 <= guess <= 1 for guess in guesses.values()), f"guesses.{task}", "shares from 0 to 1")
        for task, methods in self.runs.items():
            check_that(task in self.guesses and bool(methods), f"runs.{task}", "guesses and runs for this task")
            for name, by_seed in methods.items():
                check_that(bool(by_seed), f"runs.{task}.{name}", "a run for a seed")
                for seed, run in by_seed.items():
                    where = f"runs.{task}.{name}.{seed}"
                    if isinstance(run, Run):
                        check_that(run.scores.keys() == lengths, where, "a score at each length")
                        scores = [score for score in run.scores.values() if isinstance(score, Score)]
                        ok = all(0 <= score.accuracy <= 1 and score.error >= 0 for score in scores)
                        check_that(ok, where, "accuracies from 0 to 1 and errors of at least 0")

    def run(self, task: str, position: str, seed: int) -> Run | Failed | None:
        """Return the finished run of a task, a method and a seed, or None."""
        return self.runs.get(task, {}).get(position, {}).get(seed)

    def with_run(self, task: str, position: str, seed: int, run: Run | Failed) -> ProbeResults:
        """Return these results with a finished run added."""
        methods = self.runs.get(task, {})
        by_seed = {**methods.get(position, {}), seed: run}
        return replace(self, runs={**self.runs, task: {**methods, position: by_seed}})

    def each(self) -> Iterator[tuple[str, str, int, Run | Failed]]:
        """Yield every task, method and seed with its run."""
        for task, methods in self.runs.items():
            for position, by_seed in methods.items():
                for seed, run in by_seed.items():
                    yield task, position, seed, run


def earlier_results(out: Path, settings: ProbeSettings) -> ProbeResults | None:
    """Return the results that an earlier run with these settings left in a folder, or None.

    Raises:
        InputError: if the folder holds results for other settings, or its ``results.json`` is something else.
    """
    found = ProbeResults.load_if_there(out / "results.json")
    if found is not None:
        refuse_other_settings(out, asdict(found.settings), asdict(settings))
    return found
