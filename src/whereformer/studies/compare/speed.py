"""Measure how fast each method trains, and how much memory a training step needs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ...lab.encoders import BASELINE
from ...lab.fit import train_step
from ...lab.memory import peak_memory
from ...lab.training.optimizer import build_optimizer
from .models import untrained
from .prepare import Material
from .results import Speed

ROUNDS = 9
"""How many times each method's step is timed."""


def measure_speed(material: Material, positions: Sequence[str], on_step: Callable[[], None]) -> dict[str, Speed]:
    """Measure each method's training speed relative to a model without positions, and the memory of a step.

    In every round each method runs one step, in random order, and its time is compared with the baseline's time in the
    same round. So if the machine slows down, all methods are affected alike. The result is the median ratio over the
    rounds, with the lowest and the highest. On a CPU, time is this process's CPU time, so other programs do not count.
    """
    names, order = list(dict.fromkeys((BASELINE, *positions))), random.Random(0)
    steps: dict[str, Callable[[int], None]] = {}
    memory: dict[str, int] = {}
    for name in names:
        steps[name] = step = _step(material, name)
        step(0)  # the first step allocates the optimizer's state and torch's own buffers
        memory[name] = peak_memory(lambda step=step: step(1), material.device)  # type: ignore[misc]
        on_step()
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for index in range(2, 2 + ROUNDS):
        seconds = {name: _seconds(steps[name], index, material.device) for name in order.sample(names, len(names))}
        for name in names:
            ratios[name].append(seconds[BASELINE] / seconds[name])
        on_step()
    return {
        name: Speed(statistics.median(ratios[name]), min(ratios[name]), max(ratios[name]), memory[name])
        for name in positions
    }


def _step(material: Material, position: str) -> Callable[[int], None]:
    """Return a function that trains a method on the batch of a number."""
    model = untrained(material.settings, position, material.vocab_size, 0).to(material.device)
    optimizer = build_optimizer(model, material.settings.learning_rate)
    batches = material.batches(0)

    def step(index: int) -> None:
        inputs, labels = batches[index]
        train_step(model, optimizer, {"input_ids": inputs, "labels": labels})

    return step


def _seconds(step: Callable[[int], None], index: int, device: torch.device) -> float:
    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    step(index)
    return now() - started
