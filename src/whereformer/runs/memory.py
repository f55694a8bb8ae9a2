"""How much memory a piece of work needs at its peak, counted rather than guessed from the process's size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import (  # type: ignore[attr-defined]
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that ``work`` allocates at its peak, beyond what was there before.

    On a CUDA device torch's allocator tells. Elsewhere torch's log of every allocation in this thread does, so that
    what an operation uses within itself counts; what a library allocates without asking torch does not.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # The newer profiler has the same log, but writes lines to stderr that nobody asked for.
    options = torch._C._profiler._ExperimentalConfig()
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, options))
    try:
        work()
    finally:
        threads = _disable_profiler_legacy()
    live = peak = 0
    for event in (event for thread in threads for event in thread if str(event.kind()) == "memory_alloc"):
        live += event.cpu_memory_usage()
        peak = max(peak, live)
    return peak
