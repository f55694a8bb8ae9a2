"""Atomic additions to sums that several programs share: the gradients of queries, and of scores by offset.

The order of the additions changes from run to run, and with it the last bits of the sums.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import LEFT, RIGHT
from .tiles import add


@triton.jit
def add_tile(shared, d_products, d_scores, keys, tile, pairs, AREA: tl.constexpr, BLOCK_M: tl.constexpr):
    """Add what a transposed tile contributes; ``d_products`` is in the dtype of its ``keys``."""
    d_q = tl.dot(tl.trans(d_products), keys, input_precision="ieee")
    add(shared.query, d_q, tile.place, tile.first_row, pairs.n_q, BLOCK_M)
    if shared.diagonals.data is not None:
        _add_diagonals(shared.diagonals, d_scores, tile, pairs, AREA)


@triton.jit
def _add_diagonals(diagonals, d_scores, tile, pairs, AREA: tl.constexpr):
    """Add the sums of a transposed tile's diagonals to (batch, heads, n_q + n_k - 1), the last query's first key first.

    Beyond the ends of a table, offsets need not be told apart: the sums of keys go where the first query's would.
    """
    N: tl.constexpr = d_scores.shape[0]
    M: tl.constexpr = d_scores.shape[1]
    length = pairs.n_q + pairs.n_k - 1
    head = tl.cast(tile.place.batch, tl.int64) * pairs.heads + tile.place.head
    sums = diagonals.data + head * length
    first = pairs.n_q - 1 + tile.first_key - tile.first_row  # the place of the tile's main diagonal
    if AREA == LEFT or AREA == RIGHT:
        at = first + tl.arange(0, N)
        tl.atomic_add(sums + at, tl.sum(d_scores, 1), mask=at < length, sem="relaxed")
    else:
        # Turn each key's row to the right by its number: diagonals become columns, which each hold two of them.
        GROUPS: tl.constexpr = N // M if N > M else 1
        ROWS: tl.constexpr = N // GROUPS
        pair = tl.arange(0, N * M)
        source = pair // M * M + ((pair // M - pair) & (M - 1))
        turned = tl.reshape(tl.gather(tl.reshape(d_scores, [N * M]), source, 0), [GROUPS, ROWS, M])
        column = tl.arange(0, M)
        upper = (tl.arange(0, ROWS)[:, None] >= column[None, :])[None, :, :]
        at = first + tl.arange(0, GROUPS)[:, None] * M + column[None, :]
        there = (at >= 0) & (at < length)
        tl.atomic_add(sums + at, tl.sum(tl.where(upper, turned, 0.0), 1), mask=there, sem="relaxed")
        at -= M
        there = (at >= 0) & (at < length)
        tl.atomic_add(sums + at, tl.sum(tl.where(upper, 0.0, turned), 1), mask=there, sem="relaxed")
