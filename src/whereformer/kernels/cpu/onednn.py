"""float32 matrix products on the CPU through oneDNN, and the rules for when it is faster than PyTorch's MKL.

PyTorch computes these products with Intel's MKL, which uses 512-bit instructions only on Intel's processors. On AMD
processors that have such instructions, oneDNN is up to twice as fast; PyTorch contains it too.
``torch.backends.mkldnn.set_flags(False)`` returns all products to MKL.

oneDNN keeps memory for every shape, so many shapes would make the process grow by gigabytes. It therefore gets few:
sizes that follow the data have to be regular (:func:`is_regular`), which those of full-length batches mostly are. MKL
computes batches of any other length. (PyTorch's own gelu uses oneDNN for every shape, and the process grows with them
unless ``set_flags(False)`` forbids it.)
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
    """Compute ``left @ right.T + bias`` in float32 on the CPU, through oneDNN, without a gradient.

    Args:
        left: (rows, inner).
        right: (columns, inner).
        bias: (columns,).
    """
    # A gap between the rows of the right factor makes this hundreds of times slower.
    if not (right.is_contiguous() or right.mT.is_contiguous()):
        right = right.contiguous()
    # A bias with gaps gives wrong numbers.
    bias = None if bias is None else bias.contiguous()
    return onednn_linear(left, right, bias)


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(left) * right[0]


if has_onednn_linear() and onednn_linear_operator() not in flop_registry:
    # Torch's FLOP counter would miss this operator.
    register_flop_formula(onednn_linear_operator())(_flops)


def is_regular(size: int) -> bool:
    """Whether a size is small, or equal to (or just below) a power of two or three times a power of two."""
    near = tuning.NEARLY_REGULAR
    power = 1 << ((size + near).bit_length() - 1)
    return size <= tuning.ALWAYS_REGULAR or size + near - power <= near or 0 <= size + near - 3 * power // 2 <= near


def by_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes products of this dtype, if they are large enough."""
    return (
        dtype == torch.float32
        and device.type == "cpu"
        and tuning.current().onednn
        and bool(torch.backends.mkldnn.enabled)
    )


def onednn_suits(dtype: torch.dtype, device: torch.device, *sizes: int) -> bool:
    """Whether oneDNN computes products of these sizes: rows, columns, and the length of the sum.

    It computes only regular ones, because the memory for a shape is never freed.
    """
    return (
        by_onednn(dtype, device)
        and math.prod(sizes) >= tuning.FEWEST_MULTIPLICATIONS
        and min(sizes) >= tuning.NARROWEST_PRODUCT
        and all(map(is_regular, sizes))
    )
