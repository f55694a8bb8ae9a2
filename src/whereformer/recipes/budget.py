"""A budget of time: how many steps and seeds fit into a number of minutes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ..data.windows import IGNORED
from ..errors import InputError
from ..lab.train import Training, train

JUDGING = 0.1
"""How long judging a model takes, as a share of training it."""
USED = 0.9
"""Share of the time that is planned for. The rest is for reading the text and for the report."""
LEAST_STEPS = 100
"""The fewest steps that are worth a comparison."""
ENOUGH_STEPS = 1800
"""With fewer steps, the time of another seed is better spent on more steps."""
MOST_SEEDS = 3
"""The most seeds that a budget chooses by itself."""
TIMED_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """The steps and seeds that fit into a number of minutes."""

    steps: int
    seeds: int


def seconds_per_step(model: Any, rows: int, length: int, share: float, device: str) -> float:
    """Return the seconds of a training step on random tokens: the median of a few, after one that is not timed.

    Args:
        model: the language model.
        rows, length: the size of a batch.
        share: the share of tokens that are predicted.
        device: where to train.
    """
    tokens, times = torch.randint(model.config.vocab_size, (rows, length)), []
    asked = torch.rand(tokens.shape) < share
    asked[:, 1] = True
    batch = {"input_ids": tokens, "labels": torch.where(asked, tokens, IGNORED)}

    def on_log(steps: int, loss: float) -> None:
        times.append(time.perf_counter())

    training = Training(steps=1 + TIMED_STEPS, rate=1e-6, log_every=1)  # each step waits for the device
    train(model, lambda step: batch, training, device=device, on_log=on_log)
    return median(after - before for before, after in pairwise(times))


def fitting(minutes: float, step: float, seeds: int | None) -> Plan:
    """Return the steps and seeds that fit into a budget if every method is trained with every seed.

    Args:
        minutes: wall time of all.
        step: seconds of one step of all methods.
        seeds: number of seeds; None chooses up to MOST_SEEDS, as many as leave each training ENOUGH_STEPS, but at least
            one.

    Raises:
        InputError: if fewer than LEAST_STEPS fit; it says the least that is enough.
    """

    step, available = step * (1 + JUDGING), minutes * 60 * USED
    if seeds is None:
        enough = [count for count in range(1, MOST_SEEDS + 1) if available >= ENOUGH_STEPS * count * step]
        seeds = max(enough, default=1)
    steps = int(available / (seeds * step))
    if steps < LEAST_STEPS:
        least = LEAST_STEPS * seeds * step / (60 * USED)
        unit = 0.01 if least < 1 else 0.1
        least = round((math.floor(least / unit) + 1) * unit, 2)
        why = f"for {LEAST_STEPS} steps with each method and seed"
        raise InputError("minutes", f"expected at least {least} here, {why}, got {minutes:g}")
    return Plan(steps, seeds)
