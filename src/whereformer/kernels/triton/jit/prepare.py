"""The kernel that computes what the others need to know first."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .. import arguments
from .tiles import head_index, load, place_of

ROWS = tl.constexpr(arguments.PREPARED_ROWS)
SPAN = tl.constexpr(1024)  # numbers of the mask that a program reads at once


@triton.jit
def prepare(out, rounded_off, d_out, to_fill, pairs):
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
