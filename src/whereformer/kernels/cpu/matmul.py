"""Batched matrix products into existing memory, by oneDNN or MKL, whichever is faster."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .onednn import onednn_suits, product_transposed
from .workspace import Workspace


def add_product(total: Tensor, left: Tensor, right: Tensor, workspace: Workspace, scale: float = 1.0) -> None:
    """Compute ``total += scale * left @ right``, each (groups, rows, columns); it adds in the dtype of ``total``."""
    if left.dtype != total.dtype:
        with workspace.scope():
            found = workspace.take(tuple(total.shape), left.dtype)
            put_product(found, left, right, workspace)
            total.add_(found, alpha=scale)
    elif onednn_suits(total.dtype, total.device, *total.shape[1:], left.shape[2]):
        for sums, found in _onednn_products(total, left, right):
            sums.add_(found, alpha=scale)
    elif total.shape[0] == 1:
        # This call is faster for a single matrix with padded rows.
        total[0].addmm_(left[0], right[0], alpha=scale)
    else:
        total.baddbmm_(left, right, alpha=scale)


def put_product(target: Tensor, left: Tensor, right: Tensor, workspace: Workspace, scale: float = 1.0) -> None:
    """Compute ``target = scale * left @ right``, each (groups, rows, columns), and overwrite the target."""
    if left.dtype != target.dtype:
        with workspace.scope():
            found = workspace.take(tuple(target.shape), left.dtype)
            put_product(found, left, right, workspace)
            target.copy_(found)
            if scale != 1.0:
                target *= scale
    elif onednn_suits(target.dtype, target.device, *target.shape[1:], left.shape[2]):
        for part, found in _onednn_products(target, left, right):
            torch.mul(found, scale, out=part)
    elif target.shape[0] == 1:
        torch.addmm(target[0], left[0], right[0], beta=0, alpha=scale, out=target[0])
    else:
        torch.baddbmm(target, left, right, beta=0, alpha=scale, out=target)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left @ right``, each (..., rows, columns); ``right`` may lack the first dimensions."""
    if not onednn_suits(left.dtype, left.device, *left.shape[-2:], right.shape[-1]):
        return left @ right
    if left.dim() == 2:
        return product_transposed(left, right.mT)
    pairs = zip(left, right.expand(*left.shape[:-2], -1, -1), strict=True)
    products = [product(*pair) for pair in pairs]
    return products[0].unsqueeze(0) if len(products) == 1 else torch.stack(products)


def _onednn_products(total: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each group's part of ``total`` and the product that belongs there, or the transposes of both."""
    for target, rows, columns in zip(total, left, right, strict=True):
        if rows.stride(0) == 1 and rows.stride(1) != 1:
            # A transposed tile as the left factor would be copied, which is slow.
            yield target.mT, product_transposed(columns.mT, rows)
        else:
            yield target, product_transposed(rows, columns.mT)
