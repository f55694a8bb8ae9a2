"""Products of float32 as the tensor cores of a GPU compute them for Triton's ``tf32x3``.

Each number is the sum of two TF32 numbers, which have the exponent of float32 and 11 bits: itself rounded, and what is
left. Of the four products of the parts, the one of what is left is dropped.

Tensor cores add up a few products at a time, exactly but for what is below the last bit of the largest, and cut off
instead of rounding. How many at a time, and how many bits more they keep, has been found by experiments for some GPUs
(Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA tensor cores", for compute capability 8.0: four
products and one bit). Later ones keep more.
"""

import numpy as np

AT_ONCE, EXTRA_BITS = 4, 1
"""Of compute capability 8.0, the least exact that has TF32."""


def dot(left, right):
    """The product of two matrices of float32."""
    with np.errstate(all="ignore"):
        highs = [_rounded(operand) for operand in (left, right)]
        lows = [operand - high for operand, high in zip((left, right), highs, strict=True)]
        total = np.zeros((left.shape[0], right.shape[1]), np.float32)
        total = _multiply_add(lows[0], highs[1], total)
        total = _multiply_add(highs[0], lows[1], total)
        # Infinity minus itself is left of infinity.
        return _multiply_add(*highs, np.where(np.isnan(total), np.float32(0), total))


def _rounded(numbers):
    """The nearest TF32 numbers."""
    rounded = _cut_off((numbers.view(np.uint32) + np.uint32(0x1000)).view(np.float32))
    return np.where(np.isfinite(numbers), rounded, numbers)


def _cut_off(numbers):
    """What tensor cores read of numbers: the first bits."""
    return np.where(np.isnan(numbers), numbers, (numbers.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))


def _multiply_add(left, right, total):
    """``left @ right + total``, of the TF32 numbers that tensor cores read."""
    left, right = (_cut_off(np.ascontiguousarray(operand)).astype(np.float64) for operand in (left, right))
    for first in range(0, left.shape[1], AT_ONCE):
        block = slice(first, first + AT_ONCE)
        summands = np.concatenate([total[None], left[:, block].T[:, :, None] * right[block, None, :]])
        largest = abs(summands).max(0)
        last_bit = np.ldexp(1.0, np.frexp(largest)[1] - 24 - EXTRA_BITS)
        total = _toward_zero((np.trunc(summands / last_bit) * last_bit).sum(0))
    return total


def _toward_zero(numbers):
    """float64 as float32, cut off."""
    nearest = numbers.astype(np.float32)
    beyond = (abs(nearest) > abs(numbers)) & np.isfinite(numbers)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
