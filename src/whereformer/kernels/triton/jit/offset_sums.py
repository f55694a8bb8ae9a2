"""Atomic additions to the sums that make up the gradient of a bias, which several programs share."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import arguments
from .areas import LEFT, RIGHT
from .scores import offsets_of
from .tiles import head_index

MARGIN = tl.constexpr(arguments.LARGEST_BLOCK)


class WholeSums(NamedTuple):
    """The sums of ``OffsetSums``, and what a gradient of 1 is as a whole number."""

    data: Any
    unit: Any


@triton.jit
def add_by_offset(sums, d_scores, tile, terms, pairs, AREA: tl.constexpr):
    """Add a transposed tile to the sums by offset of its batch row and head; see ``OffsetSums``."""
    if pairs.query_positions is None and pairs.query_stride == pairs.key_stride:
        _add_diagonals(sums, d_scores, tile, pairs, AREA)
    else:
        _add_pairs(sums, d_scores, tile, terms, pairs, AREA)


@triton.jit
def _add_whole(at, numbers, unit, mask=None):
    tl.atomic_add(at, (numbers * unit).to(tl.int64), mask=mask, sem="relaxed")


@triton.jit
def _add_diagonals(sums, d_scores, tile, pairs, AREA: tl.constexpr):
    """Add the sums of a tile's diagonals.

    Beyond the ends of a table, offsets need not be told apart: the sums of keys go where the first query's would.
    """
    N: tl.constexpr = d_scores.shape[0]
    M: tl.constexpr = d_scores.shape[1]
    head = head_index(pairs, tile.place)
    # The margins take what is beyond the first and the last diagonal.
    length = pairs.n_q + pairs.n_k - 1 + 2 * MARGIN
    main = pairs.n_q - 1 + tile.first_key - tile.first_row + MARGIN
    at = sums.data + head * length + main
    if AREA != LEFT and AREA != RIGHT:
        # Shift the keys of each query to the left by its number, around the end: then diagonals are columns. The last
        # few rows are left to the atomic additions: in different warps, they would have to wait for one another.
        APART: tl.constexpr = 4
        flat = tl.reshape(tl.trans(d_scores), [N * M])
        at += tl.zeros([APART, 1], tl.int32)
        pair = tl.arange(0, M * M)
        row, column = pair // M, pair % M
        FREE: tl.constexpr = N - M
        for first in tl.static_range(0, FREE, M):
            turned = tl.reshape(tl.gather(flat, row * (N + 1) + (column + first), 0), [M // APART, APART, M])
            _add_whole(at + (first + tl.arange(0, M)[None, :]), tl.sum(turned, 0), sums.unit)
        # In the last M columns, the keys that went around the end belong to the diagonal N before.
        turned = tl.gather(flat, row * N + ((column + FREE + row) & (N - 1)), 0)
        turned = tl.reshape(turned, [M // APART, APART, M])
        row = tl.arange(0, M // APART)[:, None, None] * APART + tl.arange(0, APART)[None, :, None]
        around = row + tl.arange(0, M)[None, None, :] >= M
        at += FREE + tl.arange(0, M)[None, :]
        _add_whole(at, tl.sum(tl.where(around, 0.0, turned), 0), sums.unit)
        _add_whole(at - N, tl.sum(tl.where(around, turned, 0.0), 0), sums.unit)
    else:
        _add_whole(at + tl.arange(0, N), tl.sum(d_scores, 1), sums.unit)


@triton.jit
def _add_pairs(sums, d_scores, tile, terms, pairs, AREA: tl.constexpr):
    """Add each pair between the ends of the table to its column, and the sums of keys to those at or beyond the ends.

    This takes an atomic addition for each pair, but knows nothing of positions.
    """
    N: tl.constexpr = d_scores.shape[0]
    table, columns = terms.bias, tile.columns
    last = table.length - 1
    head = head_index(pairs, tile.place)
    left = sums.data + head * (table.length + 2 * pairs.n_k) + tile.first_key + tl.arange(0, N)
    right = left + pairs.n_k + table.length
    here = tile.first_key + tl.arange(0, N) < pairs.n_k
    if AREA == LEFT:
        _add_whole(left, tl.sum(d_scores, 1), sums.unit, here)
    elif AREA == RIGHT:
        _add_whole(right, tl.sum(d_scores, 1), sums.unit, here)
    else:
        column = offsets_of(tile, pairs) - (table.end - table.length)
        _add_whole(left, tl.sum(tl.where(column <= 0, d_scores, 0.0), 1), sums.unit, here)
        beyond = column >= tl.maximum(last, 1)
        _add_whole(right, tl.sum(tl.where(beyond, d_scores, 0.0), 1), sums.unit, here)
        between = (column > 0) & (column < last) & (columns < pairs.n_k) & (d_scores != 0.0)
        at = sums.data + head * (table.length + 2 * pairs.n_k) + pairs.n_k
        _add_whole(at + column, d_scores, sums.unit, between)
