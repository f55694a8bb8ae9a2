"""Memory that is taken once and used again: fresh memory costs more than what is done with it."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

KEPT_BYTES = 2**23
"""Of memory that waits for a thread's next call, at most."""


class Workspace:
    """Memory by name, taken once and used for every block: fresh memory costs more than what is done with it.

    On the CPU a little of it stays for the next call of the same thread.
    """

    _kept = threading.local()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: dict[tuple[str, torch.dtype], Tensor] = getattr(self._kept, device.type, {})

    def close(self) -> None:
        """Leave the memory to the next call if it is little."""
        size = sum(memory.numel() * memory.itemsize for memory in self.memory.values())
        if self.device.type == "cpu":
            self._kept.cpu = self.memory if size <= KEPT_BYTES else {}

    def get(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with whatever the memory held before."""
        wanted = math.prod(size)
        memory = self.memory.get((name, dtype))
        if memory is None or memory.numel() < wanted:
            # Memory made in inference mode could not be written to outside it.
            with torch.inference_mode(False):
                memory = self.memory[name, dtype] = torch.empty(wanted, dtype=dtype, device=self.device)
        return memory[:wanted].view(size)

    def zeros(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same, filled with zeros."""
        return self.get(name, size, dtype).zero_()

    def converted(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor itself if it is of this dtype, else a copy."""
        return tensor if tensor.dtype == dtype else self.get(name, tuple(tensor.shape), dtype).copy_(tensor)


def add_product(total: Tensor, left: Tensor, right: Tensor, workspace: Workspace) -> None:
    """``total += left @ right``, each (groups, rows, columns); products of narrower dtype are added in total's."""
    if left.dtype != total.dtype:
        product = workspace.get("product", tuple(total.shape), left.dtype)
        if len(total) == 1:
            torch.mm(left[0], right[0], out=product[0])
        else:
            torch.bmm(left, right, out=product)
        total += product
    elif len(total) == 1:
        # For a single matrix with padded rows this is the faster call.
        total[0].addmm_(left[0], right[0])
    else:
        total.baddbmm_(left, right)
