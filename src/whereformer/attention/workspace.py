"""Memory that is taken once and used again: fresh memory costs more than what is done with it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from ..linear import by_onednn, is_regular, product_transposed

FEWEST = 2**21
"""Multiplications of two matrices below which a call of oneDNN's product costs more than it saves."""

NARROWEST = 32
"""Rows, columns and what is summed over, at least, where oneDNN's product is to be faster."""

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


def add_product(total: Tensor, left: Tensor, right: Tensor, workspace: Workspace, scale: float = 1.0) -> None:
    """``total += scale * left @ right``, each (groups, rows, columns); narrower products are added in total's dtype."""
    if left.dtype != total.dtype:
        found = workspace.get("product", tuple(total.shape), left.dtype)
        if len(total) == 1:
            torch.mm(left[0], right[0], out=found[0])
        else:
            torch.bmm(left, right, out=found)
        total.add_(found, alpha=scale)
    elif onednn_suits(total.dtype, total.device, *total.shape[1:], left.shape[2]):
        for sums, found in _onednn_products(total, left, right):
            sums.add_(found, alpha=scale)
    elif len(total) == 1:
        # For a single matrix with padded rows this is the faster call.
        total[0].addmm_(left[0], right[0], alpha=scale)
    else:
        total.baddbmm_(left, right, alpha=scale)


def put_product(target: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """``target = scale * left @ right``, each (groups, rows, columns) and of one dtype."""
    if onednn_suits(target.dtype, target.device, *target.shape[1:], left.shape[2]):
        for part, found in _onednn_products(target, left, right):
            torch.mul(found, scale, out=part)
    else:
        torch.baddbmm(target, left, right, beta=0, alpha=scale, out=target)


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, each (..., rows, columns); ``right`` may lack the first dimensions."""
    if not onednn_suits(left.dtype, left.device, *left.shape[-2:], right.shape[-1]):
        return left @ right
    if left.dim() == 2:
        return product_transposed(left, right.mT)
    pairs = zip(left, right.expand(*left.shape[:-2], -1, -1), strict=True)
    products = [product(*pair) for pair in pairs]
    return products[0].unsqueeze(0) if len(products) == 1 else torch.stack(products)


def _onednn_products(total: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each group its part of ``total`` and the product that belongs there, or the transposes of both."""
    for target, rows, columns in zip(total, left, right, strict=True):
        if rows.stride(0) == 1 and rows.stride(1) != 1:
            # As a left factor a transposed tile would be copied, and slowly.
            yield target.mT, product_transposed(columns.mT, rows)
        else:
            yield target, product_transposed(rows, columns.mT)


def onednn_suits(dtype: torch.dtype, device: torch.device, *sizes: int) -> bool:
    """Whether oneDNN computes products of such rows, columns and inner size, see :mod:`whereformer.linear`.

    Only regular ones, because every shape costs memory for good.
    """
    return (
        math.prod(sizes) >= FEWEST
        and min(sizes) >= NARROWEST
        and all(map(is_regular, sizes))
        and by_onednn(dtype, device)
    )
