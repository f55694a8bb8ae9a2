"""Measure a call's time and memory, and estimate the memory of a call that is not made."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from ...lab.memory import peak_memory
from .cases import Case, make_problem
from .ways import Way, make_step

SHORTEST_MEASUREMENT = 0.02
"""Seconds. Calls that take less time are repeated within a measurement."""


class Clock:
    """Measures the seconds of a call: event time on a GPU, CPU time with one thread, wall time with several."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.now = time.process_time if threads == 1 else time.perf_counter

    def seconds(self, step: Callable[[], object]) -> float:
        """Return the mean over enough calls in a row for a good measurement."""
        calls = 1
        while True:
            elapsed = self._elapsed(step, calls)
            if elapsed >= SHORTEST_MEASUREMENT:
                return elapsed / calls
            calls = math.ceil(calls * min(1000.0, 1.2 * SHORTEST_MEASUREMENT / max(elapsed, 1e-9)))

    def _elapsed(self, step: Callable[[], object], calls: int) -> float:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            start.record()
            for _ in range(calls):
                step()
            end.record()
            torch.cuda.synchronize(self.device)
            return start.elapsed_time(end) / 1000
        started = self.now()
        for _ in range(calls):
            step()
        return self.now() - started


def memory_of(step: Callable[[], object], device: torch.device) -> int:
    """Return a call's peak memory in bytes. It runs in a new thread, so that memory kept for later calls counts too."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(peak_memory, step, device).result()


def expected_memory(way: Way, case: Case, device: torch.device) -> int:
    """Estimate the bytes that the inputs and a call would need, from two smaller lengths that fit for certain."""

    def needed(n: int) -> int:
        problem = make_problem(replace(case, n=n), device)
        return sum(tensor.nbytes for tensor in problem.inputs) + memory_of(make_step(way, problem), device)

    long = max(2, min(1024, case.n // 4))
    short = long // 2
    return extrapolate((short, needed(short)), (long, needed(long)), case.n)


def extrapolate(short: tuple[int, float], long: tuple[int, float], n: int) -> int:
    """Evaluate ``a n + b n**2`` through two points at ``n``. If b would be negative, use a line through the longer."""
    (n_1, y_1), (n_2, y_2) = short, long
    b = max(0.0, (y_2 / n_2 - y_1 / n_1) / (n_2 - n_1))
    a = max(0.0, y_2 / n_2 - b * n_2)
    return math.ceil(a * n + b * n * n)


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    available: int = psutil.virtual_memory().available
    return available
