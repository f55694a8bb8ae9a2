"""How much memory a piece of work needs at its peak, counted rather than guessed from the process's size."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _LiveStorage(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[int] = set()
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), inputs)
        return out

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self.seen or address in inputs:
            return
        self.seen.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.live -= size


def peak_memory(work: Callable[[], None], device: torch.device) -> int:
    """Bytes that ``work`` allocates at its peak, beyond what was there before.

    On a CUDA device torch's allocator tells. Elsewhere the results of all operations are counted while they live;
    what an operation uses within itself is not.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveStorage() as counted:
        work()
    return counted.peak
