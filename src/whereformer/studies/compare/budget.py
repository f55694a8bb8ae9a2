"""A budget of time: how many steps each method can train, by the speed of a few steps."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import torch

from ...errors import InputError
from ...lab.fit import train_step
from ...lab.jobs import threads, undisturbed
from ...lab.training.optimizer import build_optimizer
from .models import untrained
from .results import Budget
from .search import SEARCH_SHARE
from .settings import CompareSettings
from .windows import window_lengths

JUDGING = 0.1
"""How long judging a run takes, as a share of training it."""
USED = 0.9
"""Share of the time that is planned for. The rest is for reading the text, for speed, and for the report."""
LEAST_STEPS = 100
"""The fewest steps that are worth a comparison."""
ENOUGH_STEPS = 1800
"""With fewer steps, the time of another seed is better spent on more steps."""
MOST_SEEDS = 3
"""The most seeds that a budget chooses by itself."""
TIMED_STEPS = 3
"""Timed steps of each method and window length, after one that is not timed."""


def seconds_per_step(
    settings: CompareSettings, positions: Sequence[str], device: torch.device, timed: int = TIMED_STEPS
) -> float:
    """Return the wall time of one step of every method, added up, measured on random tokens."""
    # Shares of the windows' lengths in a training of 100 steps, which are those of any other.
    lengths = Counter(window_lengths(settings.length, 100))
    total = 0.0
    for name in positions:
        model = untrained(settings, name, settings.vocab_size, 0).to(device)
        optimizer = build_optimizer(model, settings.learning_rate)
        for length, count in lengths.items():
            rows = settings.batch_size * settings.length // length
            tokens = torch.randint(settings.vocab_size, (rows, length))
            share = 1.0 if settings.causal else settings.mask_rate
            labels = torch.where(torch.rand(rows, length) < share, tokens, -100)
            labels[:, 0] = 0
            seconds = []
            for _ in range(1 + timed):
                started = time.perf_counter()
                float(train_step(model, optimizer, {"input_ids": tokens, "labels": labels}))  # waits for a GPU
                seconds.append(time.perf_counter() - started)
            total += statistics.median(seconds[1:]) * count / 100
    return total


def plan(minutes: float, step: float, settings: CompareSettings, seeds: int | None) -> Budget:
    """Return the steps and seeds that fit into a budget if every method is trained with every seed.

    Args:
        minutes: wall time of the whole comparison.
        step: seconds of one step of all methods.
        settings: the settings; their steps do not count.
        seeds: number of seeds; None chooses up to 3, as many as leave each training ENOUGH_STEPS, but at least 1.

    Raises:
        InputError: if fewer than LEAST_STEPS fit; it says the least that is enough.
    """
    search = len(settings.rate_factors) * SEARCH_SHARE if len(settings.rate_factors) > 1 else 0.0

    def cost(count: int) -> float:
        """Return the seconds that one more step takes in all."""
        return step * (count * (1 + JUDGING) + search)

    available = minutes * 60 * USED
    if seeds is None:
        enough = [count for count in range(1, MOST_SEEDS + 1) if available >= ENOUGH_STEPS * cost(count)]
        seeds = max(enough, default=1)
    steps = int(available / cost(seeds))
    if steps < LEAST_STEPS:
        least = LEAST_STEPS * cost(seeds) / (60 * USED)
        unit = 0.01 if least < 1 else 0.1
        least = round((int(least / unit) + 1) * unit, 2)
        why = f"for {LEAST_STEPS} steps with each method and seed"
        raise InputError("minutes", f"expected at least {least} here, {why}, got {minutes:g}")
    return Budget(minutes, steps, seeds)


def shared_seconds(
    settings: CompareSettings, positions: Sequence[str], device: torch.device, jobs: int, timed: int = TIMED_STEPS
) -> float:
    """Return the wall time of one step of every method if ``jobs`` runs are made at a time."""
    at_once = undisturbed(min(jobs, len(positions)), device)
    with threads(max(1, torch.get_num_threads() // at_once)):
        step = seconds_per_step(settings, positions, device, timed)
    # The last round of runs may be incomplete.
    return step * math.ceil(len(positions) / at_once) / len(positions)


def duration(seconds: float) -> str:
    """Return a time with one or two digits, for people to read."""
    units = ((3600, "hour"), (60, "minute"), (1, "second"))
    size, unit = next((size, unit) for size, unit in units if seconds >= 1.5 * size or size == 1)
    count = max(1, round(seconds / size))
    return f"{count} {unit}{'s' if count > 1 else ''}"
