"""Atomic additions to sums that several programs share: the gradients of queries, and of scores by offset.

The order of the additions changes from run to run, and with it the last bits of the sums.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import LEFT, RIGHT
from .tiles import add


@triton.jit
def add_to_queries(shared, d_products, keys, tile, terms, pairs, BLOCK_M: tl.constexpr):
    """Add what a transposed tile contributes to the queries' gradient; ``d_products`` is in the dtype of its keys."""
    d_q = tl.dot(tl.trans(d_products), keys, input_precision=terms.products.precision)
    add(shared.query, d_q, tile.place, tile.first_row, pairs.n_q, BLOCK_M)


@triton.jit
def add_diagonals(diagonals, d_scores, tile, pairs, AREA: tl.constexpr):
    """Add the sums of a transposed tile's diagonals to those of its batch row and head.

    Beyond the ends of a table, offsets need not be told apart: the sums of keys go where the first query's would.
    """
    N: tl.constexpr = d_scores.shape[0]
    M: tl.constexpr = d_scores.shape[1]
    head = tl.cast(tile.place.batch, tl.int64) * pairs.heads + tile.place.head
    # The margins take what is beyond the first and the last diagonal.
    length = pairs.n_q + pairs.n_k - 1 + 2 * diagonals.margin
    main = pairs.n_q - 1 + tile.first_key - tile.first_row + diagonals.margin
    sums = diagonals.data + head * length + main
    if AREA != LEFT and AREA != RIGHT:
        # Shift the keys of each query to the left by its number, around the end: then diagonals are columns. In the
        # last M columns, the keys that went around the end belong to the diagonal N before.
        BLOCKS: tl.constexpr = N // M
        tl.static_assert(N == BLOCKS * M)
        pair = tl.arange(0, N * M)
        row, column = pair // M % M, pair // (M * M) * M + pair % M
        turned = tl.gather(tl.reshape(tl.trans(d_scores), [N * M]), row * N + ((column + row) & (N - 1)), 0)
        # Each thread has rows of one column in each block of M columns. The last few rows are left to the atomic
        # additions: they are in different warps, which would have to wait for one another.
        APART: tl.constexpr = 4
        turned = tl.reshape(turned, [BLOCKS, M // APART, APART, M])
        block = tl.arange(0, BLOCKS)[:, None, None, None]
        row = tl.arange(0, M // APART)[None, :, None, None] * APART + tl.arange(0, APART)[None, None, :, None]
        column = tl.arange(0, M)[None, None, None, :]
        around = (block == BLOCKS - 1) & (row + column >= M)
        sums += tl.arange(0, BLOCKS)[:, None, None] * M + tl.arange(0, M)[None, None, :]
        sums += tl.zeros([BLOCKS, APART, M], tl.int32)
        last = tl.arange(0, BLOCKS)[:, None, None] == BLOCKS - 1
        tl.atomic_add(sums, tl.sum(tl.where(around, 0.0, turned), 1), sem="relaxed")
        tl.atomic_add(sums - N, tl.sum(tl.where(around, turned, 0.0), 1), mask=last, sem="relaxed")
    else:
        tl.atomic_add(sums + tl.arange(0, N), tl.sum(d_scores, 1), sem="relaxed")
