"""Keeping autocast out of arithmetic that half precision would spoil."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A region that autocast leaves alone; on devices that know no autocast, such as meta, any region is."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
