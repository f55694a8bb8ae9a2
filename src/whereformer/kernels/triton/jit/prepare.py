"""The kernel that runs first and computes numbers for the others."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .. import arguments
from .tiles import find_batch_head, head_index, load

ROWS = tl.constexpr(arguments.PREPARED_ROWS)
SPAN = tl.constexpr(1024)  # numbers of the mask that a program reads at once


@triton.jit
def prepare(out, rounding_error, d_out, delta, delta_head_stride, d_lse, seed, pairs):
    """Fill ``delta``, the rows' seeds from dropout's ``seed``, and the end of the keys; do nothing for None.

    Each program works on ROWS queries of one head: ``delta[i] = (out[i] + rounding_error[i]) . d_out[i] - d_lse[i]``.
    """
    n_q, n_k = pairs.n_q, pairs.n_k
    blocks = tl.cdiv(n_q, ROWS)
    program = tl.program_id(0)
    batch_head = find_batch_head(program, blocks, pairs)
    block = program % blocks
    first_row = block * ROWS
    row = first_row + tl.arange(0, ROWS)  # (ROWS,)
    head = head_index(pairs, batch_head)
    row_index = head * n_q + row  # (ROWS,)
    if delta is not None:
        do = load(d_out, batch_head, first_row, n_q, ROWS).to(tl.float32)  # (ROWS, value_dim)
        o = load(out, batch_head, first_row, n_q, ROWS).to(tl.float32)  # (ROWS, value_dim)
        o += load(rounding_error, batch_head, first_row, n_q, ROWS).to(tl.float32)  # (ROWS, value_dim)
        products = tl.sum(o * do, 1)  # (ROWS,)
        if d_lse is not None:
            # The derivatives of a row's log-sum-exp are its weights.
            products -= tl.load(d_lse + row_index, mask=row < n_q, other=0.0)  # (ROWS,)
        tl.store(delta + head * delta_head_stride + row, products, mask=row < n_q)
    if seed is not None:
        # As row_seeds in dropout.py
        mixed = tl.load(seed) + (row_index + 1) * -7046029254386353131  # (ROWS,)
        mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
        tl.store(pairs.dropout_seeds + row_index, mixed.to(tl.int32), mask=row < n_q)
    if pairs.key_end is not None:
        if batch_head.head + block == 0:
            end = 0
            for first_key in range(0, n_k, SPAN):
                index = first_key + tl.arange(0, SPAN)  # (SPAN,)
                is_key = tl.load(pairs.key_mask + batch_head.batch * n_k + index, mask=index < n_k, other=0)  # (SPAN,)
                end = tl.maximum(end, tl.max(tl.where(is_key != 0, index + 1, 0), 0))
            tl.store(pairs.key_end + batch_head.batch, end)
