"""``Workspace``: memory that is allocated once and reused, because fresh memory costs more than the work done in it.

Only ``Workspace.take`` hands out uninitialised memory, so tests replace it to fill that memory with NaN.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import tuning


class Workspace:
    """A stack of memory: a tensor taken from it is valid until the scope ends in which it was taken.

    On the CPU a small part of it stays for the next call of the same thread.
    """

    _kept = threading.local()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots: list[Tensor] = self._kept.__dict__.pop(device.type, [])
        self._taken = 0

    def close(self) -> None:
        """Keep the memory for the next call if it is at most ``tuning.KEPT_BYTES``."""
        if self.device.type == "cpu" and sum(slot.numel() for slot in self._slots) <= tuning.KEPT_BYTES:
            self._kept.cpu = self._slots

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Open a scope: what is taken inside is free again afterwards."""
        taken = self._taken
        try:
            yield
        finally:
            self._taken = taken

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with whatever the memory held before."""
        wanted = math.prod(size) * dtype.itemsize
        if self._taken == len(self._slots):
            self._slots.append(torch.empty(0, dtype=torch.uint8, device=self.device))
        if self._slots[self._taken].numel() < wanted:
            # Memory allocated in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._slots[self._taken] = torch.empty(wanted, dtype=torch.uint8, device=self.device)
        memory = self._slots[self._taken][:wanted]
        self._taken += 1
        return memory.view(dtype).view(size)

    def zeros(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of zeros."""
        return self.take(size, dtype).zero_()

    def converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor itself if it is contiguous and has this dtype, else a copy."""
        if tensor.dtype == dtype and tensor.is_contiguous():
            return tensor
        return self.take(tuple(tensor.shape), dtype).copy_(tensor)
