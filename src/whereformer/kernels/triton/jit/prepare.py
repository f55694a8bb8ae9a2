"""The kernel that computes what the others need to know first, and the one that ends the gradient of a bias."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .. import arguments
from .tiles import head_index, load, place_of

ROWS = tl.constexpr(arguments.PREPARED_ROWS)
SPAN = tl.constexpr(1024)  # numbers that a program fills, or reads, at once
SHORT_SPAN = tl.constexpr(64)


@triton.jit(do_not_specialize=["table_length", "sums_length"])
def prepare(out, rounded_off, d_out, value, value_table, to_fill, pairs, table_length, sums_length):
    """Fill what is not None in ``to_fill``, and what of ``pairs`` is made of the mask and of dropout's seed.

    Each program works on ROWS queries of one head.
    """
    n_q, n_k = pairs.n_q, pairs.n_k
    blocks = tl.cdiv(n_q, ROWS)
    program = tl.program_id(0)
    place = place_of(program, blocks, pairs)
    block = program % blocks
    first_row = block * ROWS
    row = first_row + tl.arange(0, ROWS)
    head = head_index(pairs, place)
    at_row = head * n_q + row
    if to_fill.delta is not None:
        do = load(d_out, place, first_row, n_q, ROWS).to(tl.float32)  # [ROWS, value_dim]
        o = load(out, place, first_row, n_q, ROWS).to(tl.float32)
        o += load(rounded_off, place, first_row, n_q, ROWS).to(tl.float32)
        delta = tl.sum(o * do, 1)  # [ROWS]
        if to_fill.d_lse is not None:
            # The derivatives of a row's log of its sum of exponentials are its weights.
            delta -= tl.load(to_fill.d_lse + at_row, mask=row < n_q, other=0.0)
        tl.store(to_fill.delta + head * to_fill.head + row, delta, mask=row < n_q)
        if to_fill.bounds is not None:
            at = to_fill.bounds + head * 4 * blocks + block
            tl.store(at, tl.sum(tl.sum(tl.abs(do), 1), 0))
            tl.store(at + blocks, tl.sum(tl.abs(delta), 0))
            tl.store(at + 2 * blocks, _largest(value, place, first_row, n_k, blocks))
            tl.store(at + 3 * blocks, _largest(value_table, place, first_row, table_length, blocks))
    if to_fill.sums is not None:
        for first in range(block * SPAN, sums_length, blocks * SPAN):
            index = first + tl.arange(0, SPAN)
            zeros = tl.zeros([SPAN], tl.int64)
            tl.store(to_fill.sums + head * sums_length + index, zeros, mask=index < sums_length)
    if to_fill.seed is not None:
        # As row_seeds in dropout.py
        mixed = tl.load(to_fill.seed) + (at_row + 1) * -7046029254386353131
        mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
        tl.store(pairs.dropout_seeds + at_row, mixed.to(tl.int32), mask=row < n_q)
    if pairs.key_end is not None:
        if place.head + block == 0:
            end = 0
            for first in range(0, n_k, SPAN):
                index = first + tl.arange(0, SPAN)
                may = tl.load(pairs.key_mask + place.batch * n_k + index, mask=index < n_k, other=0)
                end = tl.maximum(end, tl.max(tl.where(may != 0, index + 1, 0), 0))
            tl.store(pairs.key_end + place.batch, end)


@triton.jit
def _largest(matrix, place, first_row, n, blocks):
    """Return the largest magnitude in every ``blocks``-th block of rows."""
    largest = 0.0
    if matrix.data is not None:
        for first in range(first_row, n, blocks * ROWS):
            found = tl.abs(load(matrix, place, first, n, ROWS).to(tl.float32))  # [ROWS, width]
            largest = tl.maximum(largest, tl.max(tl.max(found, 1), 0))
    return largest


@triton.jit
def unit_of(offsets, pairs, batch, head):
    """Return what a gradient of 1 is as a whole number: the largest power of 2 with which no sum of a head overflows.

    It is NaN if what it follows from is not finite. The weights of a row add up to 1. So the gradients of its scores
    add up, in magnitude, to at most the largest gradient of a weight and delta; and the former is a product with a
    value, which Hoelder's inequality bounds.
    """
    blocks = tl.cdiv(pairs.n_q, ROWS)
    at = offsets.bounds + (tl.cast(batch, tl.int64) * pairs.heads + head) * 4 * blocks
    d_out, delta, values, vectors = 0.0, 0.0, 0.0, 0.0
    for first in range(0, blocks, SHORT_SPAN):
        index = first + tl.arange(0, SHORT_SPAN)
        there = index < blocks
        d_out += tl.sum(tl.load(at + index, mask=there, other=0.0), 0)
        delta += tl.sum(tl.load(at + blocks + index, mask=there, other=0.0), 0)
        values = tl.maximum(values, tl.max(tl.load(at + 2 * blocks + index, mask=there, other=0.0), 0))
        vectors = tl.maximum(vectors, tl.max(tl.load(at + 3 * blocks + index, mask=there, other=0.0), 0))
    total = delta + d_out * (values + vectors) * pairs.dropout_scale
    # The total is below 2 ** (exponent - 126), and sums have 61 bits: 64 less the sign, and two for rounding. So the
    # unit is 2 ** (187 - exponent), but at most 2 ** 126.
    exponent = total.to(tl.int32, bitcast=True) >> 23
    unit = (tl.minimum(314 - exponent, 253) << 23).to(tl.float32, bitcast=True)
    return tl.where((exponent >= 0) & (exponent < 255), unit, float("nan"))


@triton.jit(do_not_specialize=["first", "left", "right", "number", "length", "batches"])
def finish_bias(
    d_bias, offsets, pairs, first, left, right, number, length, batches, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute BLOCK columns of one head of the gradient of a bias from the sums by offset.

    Sum i is of column ``first + i * STRIDE``. Those up to ``left`` are of the first column, and those from ``right`` on
    of the last.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(length, BLOCK)
    head = program // blocks
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    index = (column - first) // STRIDE
    inside = (index >= left) & (index < right) & (first + index * STRIDE == column) & (column < length)
    total = tl.zeros([BLOCK], tl.float64)
    for batch in range(batches):
        of_head = offsets.data + (tl.cast(batch, tl.int64) * pairs.heads + head) * number
        found = tl.load(of_head + index, mask=inside, other=0)
        if program % blocks == 0:
            found += tl.where(column == 0, _sum(of_head, 0, left, BLOCK), 0)
        if program % blocks == blocks - 1:
            found += tl.where(column == length - 1, _sum(of_head, right, number, BLOCK), 0)
        total += found.to(tl.float64) * (1.0 / unit_of(offsets, pairs, batch, head)).to(tl.float64)
    at = d_bias + tl.cast(head, tl.int64) * length + column
    tl.store(at, total.to(d_bias.dtype.element_ty), mask=column < length)


@triton.jit
def _sum(row, first, end, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int64)
    for at in range(first, end, BLOCK):
        index = at + tl.arange(0, BLOCK)
        total += tl.load(row + index, mask=index < end, other=0)
    return tl.sum(total, 0)
