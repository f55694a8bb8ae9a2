"""The gradient of a bias, from whole numbers that the kernels sum by offset.

The sum of whole numbers is the same in any order, so many programs add to the same memory and the result is still the
same bits from run to run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..fields import Call
from .arguments import OffsetSums
from .blocks import LARGEST_BLOCK

_BITS = 61
"""The bits of the largest possible sum: 64 less the sign, and two for rounding."""

_LARGEST_UNIT = 2.0**126


def new_sums(call: Call, d_out: Tensor, delta: Tensor) -> OffsetSums:
    """Allocate the sums of a call, or of some of its queries.

    Args:
        d_out: the output's gradient, (batch, heads, n_q, value_dim).
        delta: what softmax's gradient subtracts in each row, (batch, heads, n_q).
    """
    assert call.bias is not None
    batch, heads = call.value.shape[0], call.heads
    by_diagonal = call.n_q + call.n_k - 1 + 2 * LARGEST_BLOCK
    length = by_diagonal if _by_diagonal(call) else call.bias.shape[1] + 2 * call.n_k
    data = torch.zeros(batch, heads, length, dtype=torch.int64, device=d_out.device)
    return OffsetSums(data, _unit(call, d_out, delta))


def to_table(call: Call, sums: OffsetSums) -> Tensor:
    """Return the gradient of the bias, (heads, T) in float32."""
    assert call.bias is not None
    length = call.bias.shape[1]
    whole = sums.data[0] if len(sums.data) == 1 else sums.data.sum(0)
    number = whole.shape[1]
    if _by_diagonal(call):
        query_start, _, key_start, stride = call.affine
        first = key_start - query_start + (1 - call.n_q - LARGEST_BLOCK) * stride - call.first[0]
    else:
        first, stride = -call.n_k, 1
    # Of the sums, those up to ``left`` are of the first column, and those from ``right`` on of the last.
    left = min(max(-first // stride + 1, 0), number)
    right = min(max(-((first - max(length - 1, 1)) // stride), left), number)
    table = whole.new_zeros(len(whole), length)
    table[:, first + left * stride : first + right * stride : stride] = whole[:, left:right]
    table[:, 0].add_(whole[:, :left].sum(1))
    table[:, -1].add_(whole[:, right:].sum(1))
    # Numbers that are not finite have no unit.
    return table / sums.unit


def _by_diagonal(call: Call) -> bool:
    _, query_stride, _, key_stride = call.affine
    return call.query_positions is None and query_stride == key_stride


def _unit(call: Call, d_out: Tensor, delta: Tensor) -> Tensor:
    """Return the largest unit with which no sum overflows; NaN or 0 if what it follows from is not finite.

    The weights of a row add up to 1. So the gradients of its scores add up, in magnitude, to at most the largest
    gradient of a weight and delta; and the former is a product with a value, which Hoelder's inequality bounds.
    """
    norm = torch.linalg.vector_norm
    largest = norm(call.value, math.inf, dtype=torch.float32)
    if call.value_table is not None:
        largest += norm(call.value_table, math.inf, dtype=torch.float32)
    d_weights = norm(d_out, 1, dtype=torch.float32)
    total = torch.addcmul(norm(delta, 1), d_weights, largest, value=1.0 / (1.0 - call.dropout_p))
    return torch.exp2(_BITS - total.log2_().ceil_()).clamp_(max=_LARGEST_UNIT)
