"""Context and casts that control autocast, where half precision would spoil the arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .torch_private import constant_when_compiled


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast; on devices that have no autocast, such as meta, it does nothing."""
    # If autocast is off there is nothing to do, except in an exported program, which may later run under it.
    if autocast_dtype(device) is not None or (torch.compiler.is_exporting() and _has_autocast(device.type)):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on a device; None if it is off."""
    kind = device.type
    # Torch refuses the second question for devices that have no autocast, such as meta.
    return torch.get_autocast_dtype(kind) if _has_autocast(kind) and torch.is_autocast_enabled(kind) else None


# A constant, because the compiler of torch 2.11 cannot trace the question.
@constant_when_compiled
def _has_autocast(kind: str) -> bool:
    """Whether there is autocast for a kind of device."""
    return torch.amp.is_autocast_available(kind)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors of one device as autocast does for torch's own attention; if it is off, return them unchanged."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
