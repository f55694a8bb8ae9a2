"""Memory that is taken once and used again, because fresh memory costs more than what is done with it; and products."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import tuning
from .products import by_onednn, is_regular, product_transposed


class Workspace:
    """A stack of memory: what is taken belongs to whoever took it until the scope ends in which it was taken.

    On the CPU a little of it stays for the next call of the same thread.
    """

    _kept = threading.local()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots: list[Tensor] = self._kept.__dict__.pop(device.type, [])
        self._taken = 0

    def close(self) -> None:
        """Leave the memory to the next call if it is little."""
        if self.device.type == "cpu" and sum(slot.numel() for slot in self._slots) <= tuning.KEPT_BYTES:
            self._kept.cpu = self._slots

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is taken inside is free again afterwards."""
        taken = self._taken
        try:
            yield
        finally:
            self._taken = taken

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with whatever the memory held before."""
        wanted = math.prod(size) * dtype.itemsize
        if self._taken == len(self._slots):
            self._slots.append(torch.empty(0, dtype=torch.uint8, device=self.device))
        if self._slots[self._taken].numel() < wanted:
            # Memory made in inference mode could not be written to outside it.
            with torch.inference_mode(False):
                self._slots[self._taken] = torch.empty(wanted, dtype=torch.uint8, device=self.device)
        memory = self._slots[self._taken][:wanted]
        self._taken += 1
        return memory.view(dtype).view(size)

    def zeros(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same, filled with zeros."""
        return self.take(size, dtype).zero_()

    def converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor itself if it is contiguous and of this dtype, else a copy."""
        if tensor.dtype == dtype and tensor.is_contiguous():
            return tensor
        return self.take(tuple(tensor.shape), dtype).copy_(tensor)


def add_product(total: Tensor, left: Tensor, right: Tensor, workspace: Workspace, scale: float = 1.0) -> None:
    """``total += scale * left @ right``, each (groups, rows, columns); narrower products are added in total's dtype."""
    if left.dtype != total.dtype:
        with workspace.scope():
            found = workspace.take(tuple(total.shape), left.dtype)
            put_product(found, left, right, workspace)
            total.add_(found, alpha=scale)
    elif onednn_suits(total.dtype, total.device, *total.shape[1:], left.shape[2]):
        for sums, found in _onednn_products(total, left, right):
            sums.add_(found, alpha=scale)
    elif total.shape[0] == 1:
        # For a single matrix with padded rows this is the faster call.
        total[0].addmm_(left[0], right[0], alpha=scale)
    else:
        total.baddbmm_(left, right, alpha=scale)


def put_product(target: Tensor, left: Tensor, right: Tensor, workspace: Workspace, scale: float = 1.0) -> None:
    """``target = scale * left @ right``, each (groups, rows, columns), over whatever the target held before."""
    if left.dtype != target.dtype:
        with workspace.scope():
            found = workspace.take(tuple(target.shape), left.dtype)
            put_product(found, left, right, workspace)
            target.copy_(found)
            target *= scale
    elif onednn_suits(target.dtype, target.device, *target.shape[1:], left.shape[2]):
        for part, found in _onednn_products(target, left, right):
            torch.mul(found, scale, out=part)
    elif target.shape[0] == 1:
        torch.addmm(target[0], left[0], right[0], beta=0, alpha=scale, out=target[0])
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
    """Whether oneDNN computes products of such rows, columns and inner size, see ``whereformer.kernels.cpu.products``.

    Only regular ones, because every shape costs memory for good.
    """
    return (
        by_onednn(dtype, device)
        and math.prod(sizes) >= tuning.FEWEST_MULTIPLICATIONS
        and min(sizes) >= tuning.NARROWEST_PRODUCT
        and all(map(is_regular, sizes))
    )
