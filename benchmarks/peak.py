"""Measure peak memory: of a function, by counting allocations, and of a process, as the system counts it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy


def peak_memory(work: Callable[[], object]) -> int:
    """Return the bytes that ``work`` allocates at its peak on the CPU, on top of what was allocated before.

    They come from torch's log of every allocation in this thread. It includes temporary memory inside an operation, but
    not what libraries allocate without torch.
    """
    live = peak = 0
    for change in _allocations(work):
        live += change
        peak = max(peak, live)
    return peak


def peak_of_first_call(step: Callable[[], object]) -> int:
    """Return a call's peak memory in bytes. It runs in a new thread, so that memory kept for later calls counts too."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(peak_memory, step).result()


def _allocations(work: Callable[[], object]) -> list[int]:
    """Return the sizes that ``work`` allocates on the CPU in this thread, in order, in bytes; negative where it frees.

    The public profiler has the same log, but it writes unwanted lines to stderr.
    """
    options = torch._C._profiler._ExperimentalConfig()
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, options))
    try:
        work()
    finally:
        threads = _disable_profiler_legacy()
    events = (event for thread in threads for event in thread)
    return [event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"]


def mebibytes(name: str) -> float:
    """Return a size of this process from the system: VmRSS, or VmHWM for the peak."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def added_memory(step: Callable[[], object]) -> float:
    """Return how much a call adds to this process at its peak, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = mebibytes("VmRSS")
    step()
    return mebibytes("VmHWM") - before
