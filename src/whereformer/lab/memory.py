"""Measure a function's peak memory by counting allocations, not by watching the size of the process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.torch_private import allocations


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
    for change in allocations(work):
        live += change
        peak = max(peak, live)
    return peak
