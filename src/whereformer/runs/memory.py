"""How much memory a piece of work needs at its peak, counted rather than guessed from the process's size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.torch_private import allocations


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
    live = peak = 0
    for change in allocations(work):
        live += change
        peak = max(peak, live)
    return peak
