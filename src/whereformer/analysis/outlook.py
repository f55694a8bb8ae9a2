"""Where a method's loss is heading: a power law through the end of its training, continued to more steps."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import curve_fit

LAST_SHARE = 0.4
"""The share of a training, at its end, that the curve is fitted to: there, windows have their full length."""
AHEAD = 4
"""The losses of this many times the steps are predicted."""
BINS = 20
"""Mean losses that the curve is fitted to."""
LEAST_PER_BIN = 2
"""The fewest steps in one of them."""
FLOORS = np.linspace(0.0, 0.9, 19)
"""The floors that are tried, as shares of the loss at the end."""
MOST_POWER = 3.0
SHARES = np.linspace(1 - LAST_SHARE, 2, 29)
"""Where the fitted curve is drawn, as shares of the steps."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Outlook:
    """How much the loss of a method is expected to fall, in nats, with twice the steps and with AHEAD times as many.

    ``curve`` is the fitted training loss at each of :data:`SHARES`.
    """

    double: Estimate
    ahead: Estimate
    curve: list[float]


def outlook(runs: Sequence[Sequence[float]]) -> Outlook | None:
    """Return what the training losses of a method say about longer trainings; None if they are too few.

    Args:
        runs: the training loss of each step, for each seed.
    """
    found = [each for each in map(fitted, runs) if each is not None]
    if not found or len(found) < len(runs):
        return None
    return Outlook(
        _mean([each.double for each in found]),
        _mean([each.ahead for each in found]),
        [statistics.fmean(losses) for losses in zip(*(each.curve for each in found), strict=True)],
    )


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over seeds. The error does not shrink, since the curve is wrong for all seeds alike."""
    values = [each.value for each in estimates]
    spread = statistics.variance(values) / len(values) if len(values) > 1 else 0.0
    error = statistics.fmean(each.error for each in estimates)
    return Estimate(statistics.fmean(values), float(np.hypot(error, spread**0.5)))


def fitted(losses: Sequence[float]) -> Outlook | None:
    """Fit ``floor + fall * share ** -power`` to the last 40% of a training, where windows have their full length.

    ``share`` is the step divided by the number of steps. The end of one training hardly determines the floor. Therefore
    19 floors from 0 to 90% of the last loss are tried: their predictions are averaged, each weighted by its likelihood,
    and the error covers their spread. In that part of a training the learning rate falls to zero, and the fall of the
    loss that this adds is part of the curve.
    """
    steps = len(losses)
    first = int((1 - LAST_SHARE) * steps)
    if steps - first < BINS * LEAST_PER_BIN:
        return None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that fail, which are left out
        parts = np.array_split(np.asarray(losses[first:], dtype=np.float64), BINS)
        ends = np.cumsum([len(part) for part in parts])
        share = (first + ends - np.array([len(part) - 1 for part in parts]) / 2) / steps
        means = np.array([part.mean() for part in parts])
        errors = np.array([part.std(ddof=1) / len(part) ** 0.5 for part in parts])
        errors = np.maximum(errors, 1e-4 * np.abs(means))
        if not (np.isfinite(means).all() and means.min() > 0 and np.isfinite(errors).all()):
            return None
        return _averaged(share, means, errors)


def _averaged(share: Numbers, means: Numbers, errors: Numbers) -> Outlook | None:
    """Fit the curve with every floor, and average what they predict."""
    misfits, predictions, curves = [], [], []
    bounds = (0.0, 0.0), (np.inf, MOST_POWER)
    for floor in FLOORS * means[-1]:
        if floor >= means.min():
            continue

        def curve(x: Numbers, fall: float, power: float, floor: float = floor) -> Numbers:
            return np.asarray(floor + fall * x**-power)

        try:
            start = means[-1] - floor, 0.3
            found, covariance = curve_fit(curve, share, means, start, errors, absolute_sigma=True, bounds=bounds)
        except (RuntimeError, ValueError):
            continue
        misfit = float((((curve(share, *found) - means) / errors) ** 2).sum())
        # A curve that does not fit says less.
        worse = max(1.0, misfit / (len(means) - 2))
        each = [_fall(found, covariance * worse, times) for times in (2, AHEAD)]
        if all(np.isfinite(value) and np.isfinite(error) for value, error in each) and np.isfinite(misfit):
            misfits.append(misfit / worse)
            predictions.append(each)
            curves.append(curve(SHARES, *found))
    if not predictions:
        return None
    weights = np.exp(-(np.array(misfits) - min(misfits)) / 2)
    weights /= weights.sum()
    double, ahead = (_mixed(weights, np.array(column)) for column in zip(*predictions, strict=True))
    return Outlook(double, ahead, (weights @ np.array(curves)).tolist())


def _fall(found: Numbers, covariance: Numbers, times: float) -> tuple[float, float]:
    """Return by how much the loss falls from the end to ``times`` as many steps, and the standard error of that."""
    fall, power = found
    left = times**-power
    gradient = np.array([1 - left, fall * left * np.log(times)])
    return float(fall * (1 - left)), float(max(0.0, gradient @ covariance @ gradient) ** 0.5)


def _mixed(weights: Numbers, predictions: Numbers) -> Estimate:
    """Return the mean of predictions, and their error with the spread between them."""
    values, errors = predictions.T
    mean = float(weights @ values)
    return Estimate(mean, float((weights @ (errors**2 + (values - mean) ** 2)) ** 0.5))
