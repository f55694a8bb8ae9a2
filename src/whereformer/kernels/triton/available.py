"""Checks which calls ``backend="triton"`` can compute, and on which devices."""

from __future__ import annotations

import importlib.util
import os

import torch

from ..call import Call
from ..torch_private import constant_when_compiled

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_WIDTH, _MAX_WIDTH = 16, 256
_MAX_QUERY_OFFSETS = 1024  # the kernels need a product of each key with each offset, so memory grows with both
MAX_BLOCK = 128
"""The most queries or keys in a tile."""

_INSTALLED = importlib.util.find_spec("triton") is not None


def unsupported_reason(call: Call, device: torch.device) -> str | None:
    """Return why this backend cannot take the call on that device; None if it can."""
    if reason := _unavailable_on(device):
        return reason
    if call.value.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {str(call.value.dtype).removeprefix('torch.')}"
    for name, rows in (("value's head_dim", call.value), ("head_dim", call.query)):
        width = None if rows is None else rows.shape[3]
        if width is not None and not _MIN_WIDTH <= width <= _MAX_WIDTH:
            return f"needs a {name} from {_MIN_WIDTH} to {_MAX_WIDTH}, got {width}"
    if call.query_factors is not None and (factors := call.query_factors.shape[3]) > _MAX_WIDTH:
        return f"needs FactorPairs of at most {_MAX_WIDTH} factors, got {factors}"
    if call.query_table is not None and (offsets := call.query_table.shape[1]) > _MAX_QUERY_OFFSETS:
        return f"needs OffsetQueries of at most {_MAX_QUERY_OFFSETS} offsets, got {offsets}"
    query_start, query_stride, key_start, key_stride = call.affine
    # Also in tiles that reach beyond the ends
    steps = (call.n_q + 2 * MAX_BLOCK) * query_stride + (call.n_k + 2 * MAX_BLOCK) * key_stride
    if abs(key_start - query_start) + steps >= 2**30:
        return f"needs offsets below 2**30, got positions from {query_start} and {key_start} on"
    return None


@constant_when_compiled
def _unavailable_on(device: torch.device) -> str | None:
    """Return why this backend cannot run on the device; None if it can."""
    if device.type == "cuda" and not torch.cuda.is_available():
        # The call will run on another machine, whose GPU is unknown.
        return None
    if not _INSTALLED:
        return "needs Triton, which is not installed"
    if device.type == "cpu" and is_interpreted():
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, got one of AMD's"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs compute capability 8.0, got {major}.{minor}"


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
