"""Search a learning rate for each method: short trainings with a few rates tell whether the usual one fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from ...lab.fit import DivergedError, tenth
from .prepare import Material
from .results import Trial
from .settings import CompareSettings
from .train import train

SEARCH_SHARE = 0.15
"""Steps of a short training, as a share of a comparison's. Its windows grow as in a whole one."""
CLEARLY_LOWER, CLEARLY_HIGHER = 0.1, 0.5
"""How much lower the loss of a short training has to be with a lower, or with a higher rate than with the usual one.
Short runs tolerate higher learning rates: with the default sizes, twice the usual rate was up to 0.09 better in them,
but 0.07 to 0.31 worse in whole trainings, with every method that was tried. With twice the steps it was even 0.39
better, because with one rate the loss had just left the plateau at the beginning, and with the other not yet."""
JUDGED_SHARE = 0.1
"""The mean training loss of this share of a short training, at its end, decides."""


def rates(settings: CompareSettings) -> list[float]:
    """Return the learning rates to try."""
    return [factor * settings.learning_rate for factor in settings.rate_factors]


def short_steps(settings: CompareSettings) -> int:
    """Return the number of steps of a short training."""
    return max(1, round(SEARCH_SHARE * settings.steps))


def search_rate(material: Material, position: str, seed: int, on_step: Callable[[float], None]) -> list[Trial]:
    """Train a method shortly with every rate, on the same batches, and return what became of each.

    The rate rises for as many steps as in a whole training, two thirds of a short one, and then falls to zero. With
    fewer steps, high rates do harm that they do not do in a whole training.
    """
    trials, steps = [], short_steps(material.settings)
    for rate in rates(material.settings):
        try:
            warmup = tenth(material.settings.steps)
            _, fitted = train(material, position, seed, rate, on_step, steps=steps, warmup=warmup)
            last = fitted.losses[-max(1, round(JUDGED_SHARE * steps)) :]
            trials.append(Trial(rate, round(statistics.fmean(last), 4)))
        except DivergedError:
            trials.append(Trial(rate, None))
    return trials


def best_rate(trials: list[Trial], usual: float) -> float | None:
    """Return the rate that is nearest to the usual one, or that with the lowest loss of those that are clearly better.

    Rates that give a loss that is not finite are rejected; None if there are no others.
    """
    finished = [(trial.loss, trial.rate) for trial in trials if trial.loss is not None and math.isfinite(trial.loss)]
    if not finished:
        return None
    kept, nearest = min(finished, key=lambda each: abs(math.log(each[1] / usual)))
    better = [
        (loss, rate) for loss, rate in finished if loss < kept - (CLEARLY_HIGHER if rate > nearest else CLEARLY_LOWER)
    ]
    return min(better, default=(kept, nearest))[1]
