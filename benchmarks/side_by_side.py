"""Time several ways in turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn

Name = TypeVar("Name")


@dataclass(frozen=True)
class Times:
    """Seconds of one step, and their ratio to the baseline's in the same round.

    Args:
        seconds: the median time.
        ratio: the median ratio.
        lowest: the lowest ratio.
        highest: the highest ratio.
    """

    seconds: float
    ratio: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.lowest:.2f}-{self.highest:.2f})"


def time_by_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, baseline: str, models: Mapping[str, nn.Module] | None = None
) -> dict[str, Times]:
    """Run every step once per round, in random order, after one round that isn't counted.

    Args:
        steps: the steps to time, by name.
        rounds: number of rounds that count.
        baseline: the name that ratios are relative to.
        models: models with the same names, if steps train: their gradients are dropped after each step.
    """

    def measure(name: str) -> float:
        seconds = cpu_seconds(steps[name])
        if models is not None:
            models[name].zero_grad()
        return seconds

    return summarize(by_turns({name: partial(measure, name) for name in steps}, rounds), baseline)


def summarize(seconds: Mapping[Name, Sequence[float]], baseline: Name) -> dict[Name, Times]:
    """Return medians and ranges of the seconds of all rounds."""
    ratios = ratios_by_round(seconds, baseline)
    return {
        name: Times(statistics.median(times), statistics.median(ratios[name]), min(ratios[name]), max(ratios[name]))
        for name, times in seconds.items()
    }


def cpu_seconds(step: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    started = time.process_time()
    step()
    return time.process_time() - started


def by_turns(costs: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Measure every cost once per round, in random order, after one round that isn't counted."""
    order = random.Random(0)
    measured: dict[Name, list[float]] = {name: [] for name in costs}
    for _ in range(rounds + 1):
        for name in order.sample(list(costs), len(costs)):
            measured[name].append(costs[name]())
    return {name: numbers[1:] for name, numbers in measured.items()}


def ratios_by_round(costs: Mapping[Name, Sequence[float]], baseline: Name) -> dict[Name, list[float]]:
    """Divide the costs of each round by the baseline's cost in the same round."""
    return {
        name: [cost / unit for cost, unit in zip(numbers, costs[baseline], strict=True)]
        for name, numbers in costs.items()
    }
