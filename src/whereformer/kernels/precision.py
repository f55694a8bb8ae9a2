"""Keeping autocast out of arithmetic that half precision would spoil."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A region that autocast leaves alone; on devices that know no autocast, such as meta, any region is."""
    # Where it is off there is nothing to do, but in an exported program, which may run under it later.
    if _autocasts(device.type) or (torch.compiler.is_exporting() and torch.amp.is_autocast_available(device.type)):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _autocasts(kind: str) -> bool:
    """Whether autocast is on, for a kind of device."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device as autocast, where it is on, gives them to torch's own attention; else as they are."""
    kind = tensors[0].device.type
    if not _autocasts(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
