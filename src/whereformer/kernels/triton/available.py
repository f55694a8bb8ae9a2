"""What ``backend="triton"`` can compute, and where."""

from __future__ import annotations

import importlib.util
import os

import torch

from ..call import Call
from ..terms import FactorPair, offset_range
from ..torch_private import constant_when_compiled

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NARROWEST, _WIDEST = 16, 256
_INSTALLED = importlib.util.find_spec("triton") is not None


def unavailable(call: Call, device: torch.device) -> str | None:
    """Why this backend cannot take the call on that device, in a line that says what can; None if it can."""
    reason = _unavailable(call, device)
    return None if reason is None else f"backend 'triton' {reason}; use backend='blockwise'"


def _unavailable(call: Call, device: torch.device) -> str | None:
    if reason := _unavailable_on(device):
        return reason
    if call.value.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {str(call.value.dtype).removeprefix('torch.')}"
    widths = {"value's head_dim": call.value.shape[3]}
    if call.query is not None:
        widths["head_dim"] = call.query.shape[3]
    for name, width in widths.items():
        if not _NARROWEST <= width <= _WIDEST:
            return f"needs a {name} from {_NARROWEST} to {_WIDEST}, got {width}"
    rank = sum(term.query_factors.shape[3] for term in call.terms if isinstance(term, FactorPair))
    if rank > _WIDEST:
        return f"needs FactorPairs of at most {_WIDEST} factors, got {rank}"
    span = offset_range(call.query_positions, call.key_positions)
    if span is not None and max(-span[0], span[1]) >= 2**30:
        return f"needs offsets below 2**30, got {span[0]} to {span[1]}"
    return None


@constant_when_compiled
def _unavailable_on(device: torch.device) -> str | None:
    """Why this backend cannot run on the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        # A call that is to run elsewhere, and nothing is known against the GPU there.
        return None
    if not _INSTALLED:
        return "needs Triton, which is not installed"
    if device.type == "cpu" and interpreted():
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, got one of AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
