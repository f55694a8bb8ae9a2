"""Search a learning rate for each method: a short training with each of a few rates, and the best is kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

from ...errors import InputError
from .prepare import CompareJob
from .results import Trial
from .settings import Sizes
from .train import train, warmup_steps

SEARCH_SHARE = 0.15
"""Steps of a short training, as a share of a comparison's. Its windows grow as in a whole one."""
JUDGED_SHARE = 0.1
"""The mean training loss of this share of a short training, at its end, decides."""


def short_steps(sizes: Sizes) -> int:
    """Return the number of steps of a short training."""
    return max(1, round(SEARCH_SHARE * sizes.steps))


def rates(sizes: Sizes) -> list[float]:
    """Return the learning rates to try."""
    return [factor * sizes.learning_rate for factor in sizes.rate_factors]


def search_rate(job: CompareJob, position: str, on_step: Callable[[float], None]) -> list[Trial]:
    """Train a method shortly with every rate, on the same batches, and return what became of each.

    The rate rises for as many steps as in a whole training, two thirds of a short one, and then falls to zero. With
    fewer steps, high rates do harm that they do not do in a whole training.
    """
    short = replace(job, settings=replace(job.settings, steps=short_steps(job.settings)))
    trials = []
    for rate in rates(job.settings):
        try:
            _, losses, _ = train(short, position, job.seeds[0], rate, warmup_steps(job.settings), on_step)
        except InputError as error:
            if error.field != "learning_rate":  # that names a loss that is not a number
                raise
            trials.append(Trial(rate, None))
        else:
            count = max(1, round(JUDGED_SHARE * len(losses)))
            trials.append(Trial(rate, round(statistics.fmean(losses[-count:]), 4)))
    return trials


def best_rate(trials: list[Trial]) -> float | None:
    """Return the rate with the lowest loss, the lower rate of two with the same; None if every loss was no number."""
    finished = [(trial.loss, trial.rate) for trial in trials if trial.loss is not None and math.isfinite(trial.loss)]
    return min(finished)[1] if finished else None
