"""float32 products on the CPU, through oneDNN where what PyTorch calls for them wastes half of the processor.

PyTorch leaves them to Intel's MKL, which uses 512-bit instructions on Intel's processors only. On AMD's that have them
oneDNN, which PyTorch also carries, is up to twice as fast. ``torch.backends.mkldnn.set_flags(False)`` leaves all of it
to MKL again.

Over many shapes it makes the process grow by gigabytes. So it is given few: sizes that follow the data have to be
regular (:func:`is_regular`), as those of batches of full length mostly are. Batches of any length are MKL's. (PyTorch's
own gelu goes through oneDNN for every shape, and grows with them, where ``set_flags(False)`` does not forbid it.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .. import tuning
from ..torch_private import has_onednn_linear, onednn_linear, onednn_linear_operator


def product_transposed(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right.T + bias`` of float32 on the CPU, through oneDNN; without a gradient.

    Args:
        left: (rows, inner).
        right: (columns, inner).
        bias: (columns,).
    """
    # With a gap between the right factor's rows it takes hundreds of times as long.
    if not (right.is_contiguous() or right.mT.is_contiguous()):
        right = right.contiguous()
    # A bias with gaps gives wrong numbers.
    bias = None if bias is None else bias.contiguous()
    return onednn_linear(left, right, bias)


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(left) * right[0]


if has_onednn_linear() and onednn_linear_operator() not in flop_registry:
    # Torch's counter of FLOPs would pass it over.
    register_flop_formula(onednn_linear_operator())(_flops)


def is_regular(size: int) -> bool:
    """Whether a size is small, or a power of two or three times one, or just below such a number."""
    near = tuning.NEARLY_REGULAR
    power = 1 << ((size + near).bit_length() - 1)
    return size <= tuning.ALWAYS_REGULAR or size + near - power <= near or 0 <= size + near - 3 * power // 2 <= near


def by_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes products of this dtype that are large enough."""
    return (
        dtype == torch.float32
        and device.type == "cpu"
        and tuning.current().onednn
        and bool(torch.backends.mkldnn.enabled)
    )


def onednn_suits(dtype: torch.dtype, device: torch.device, *sizes: int) -> bool:
    """Whether oneDNN computes products of these sizes: rows, columns, and what is summed over.

    Only regular ones, because every shape costs memory for good.
    """
    return (
        by_onednn(dtype, device)
        and math.prod(sizes) >= tuning.FEWEST_MULTIPLICATIONS
        and min(sizes) >= tuning.NARROWEST_PRODUCT
        and all(map(is_regular, sizes))
    )
