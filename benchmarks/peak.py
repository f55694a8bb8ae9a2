"""Measure peak memory: of a function, by counting allocations, and of a process, as the system counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that ``work`` allocates at its peak, on top of what was allocated before.

    On a CUDA device, torch's allocator counts them. Elsewhere they come from torch's log of every allocation in this
    thread. It includes temporary memory inside an operation, but not what libraries allocate without torch.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    live = peak = 0
    for change in _allocations(work):
        live += change
        peak = max(peak, live)
    return peak


def _allocations(work: Callable[[], object]) -> list[int]:
    """Return what ``work`` allocates on the CPU in this thread, in order, in bytes; negative where it frees memory.

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


OUT_OF_MEMORY = 9
"""The exit code of a process that ran out of memory."""


def mebibytes(name: str) -> float:
    """Return a size of this process from the system: VmRSS, or VmHWM for the peak."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def added_memory(step: Callable[[], object]) -> float:
    """Return what a call adds to this process at its peak, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = mebibytes("VmRSS")
    step()
    return mebibytes("VmHWM") - before


def in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of a script, which begins with :func:`answer`, in a new process; None if it ran out of memory."""
    call = json.dumps([function.__name__, *arguments])
    done = subprocess.run([sys.executable, function.__code__.co_filename, call], capture_output=True, text=True)
    if done.returncode == OUT_OF_MEMORY:
        return None
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def answer(*functions: Callable[..., Any]) -> None:
    """End this process with the result of a call if :func:`in_a_process` started it."""
    if sys.argv[1:] and sys.argv[1].startswith("["):
        name, *arguments = json.loads(sys.argv[1])
        torch.set_num_threads(1)
        print(json.dumps({function.__name__: function for function in functions}[name](*arguments)))
        raise SystemExit
