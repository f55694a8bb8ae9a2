"""Time several ways in turns, so that other load on the machine affects all of them alike; print and store the rows."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peak import peak_memory
from rich.console import Console
from torch import nn

from whereformer.provenance import write_results


def memory_of(step: Callable[[], object], device: torch.device) -> int:
    """Return a call's peak memory in bytes. It runs in a new thread, so that memory kept for later calls counts too."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(peak_memory, step, device).result()


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


@dataclass(frozen=True)
class SideBySide:
    """Options of benchmarks that time models in turns and write a row for each."""

    rounds: int = 5
    """How many times each model is timed."""

    def measure(
        self, steps: Mapping[str, Callable[[], object]], models: Mapping[str, nn.Module], baseline: str
    ) -> dict[str, dict[str, Any]]:
        """Return the :class:`Times` of each step, with its peak memory beside its model's gradients as "mib"."""
        return {
            name: {**asdict(times), "mib": _peak(steps[name], models[name]) // 2**20}
            for name, times in time_by_turns(steps, models, self.rounds, baseline).items()
        }


def _peak(step: Callable[[], object], model: nn.Module) -> int:
    step()  # leaves gradients, so that the measured step only adds to them
    peak = memory_of(step, torch.device("cpu"))
    model.zero_grad()
    return peak


def show(console: Console, label: str, row: Mapping[str, Any], more: str = "") -> None:
    """Print a row: the ratio with its range, the time, ``more`` and the memory."""
    ratio = f"{row['ratio']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})"
    console.print(f"{label}{ratio}  {row['seconds']:.2f} s  {more}{row['mib']} MiB", highlight=False)


def write_rows(console: Console, out: Path, method: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of a benchmark, and its docstring, which says how they were measured."""
    write_results(out, {"method": " ".join(str(method).split()), "rows": rows})
    console.print(f"wrote {out}", highlight=False)


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

    def seconds_of(name: str) -> float:
        seconds = cpu_seconds(steps[name])
        models[name].zero_grad()
        return seconds

    seconds = by_turns({name: partial(seconds_of, name) for name in steps}, rounds)
    ratios = ratios_by_round(seconds, baseline)
    return {
        name: Times(statistics.median(own), statistics.median(ratios[name]), min(ratios[name]), max(ratios[name]))
        for name, own in seconds.items()
    }


def cpu_seconds(step: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    started = time.process_time()
    step()
    return time.process_time() - started


def by_turns(costs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure every cost once per round, in random order, after one round that isn't counted."""
    order = random.Random(0)
    measured: dict[str, list[float]] = {name: [] for name in costs}
    for _ in range(rounds + 1):
        for name in order.sample(list(costs), len(costs)):
            measured[name].append(costs[name]())
    return {name: numbers[1:] for name, numbers in measured.items()}


def ratios_by_round(costs: Mapping[str, Sequence[float]], baseline: str) -> dict[str, list[float]]:
    """Divide the costs of each round by the baseline's cost in the same round."""
    return {
        name: [cost / other for cost, other in zip(numbers, costs[baseline], strict=True)]
        for name, numbers in costs.items()
    }
