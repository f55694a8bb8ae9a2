"""Time several models in turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Times:
    """CPU seconds of one step, and their ratio to the baseline's in the same round.

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


def time_by_turns(
    steps: Mapping[str, Callable[[], object]], models: Mapping[str, nn.Module], rounds: int, baseline: str
) -> dict[str, Times]:
    """Run every step once per round, in random order, after one round that isn't counted.

    Args:
        steps: the steps to time, by name.
        models: the models with the same names; their gradients are dropped after each step.
        rounds: number of rounds that count.
        baseline: the name that ratios are relative to.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for counted in range(rounds + 1):
        for name in order.sample(list(steps), len(steps)):
            started = time.process_time()
            steps[name]()
            if counted:
                seconds[name].append(time.process_time() - started)
            models[name].zero_grad()
    ratios = {
        name: sorted(mine / theirs for mine, theirs in zip(own, seconds[baseline], strict=True))
        for name, own in seconds.items()
    }
    return {
        name: Times(statistics.median(own), statistics.median(ratios[name]), ratios[name][0], ratios[name][-1])
        for name, own in seconds.items()
    }
