"""Sums over a row's keys by offset, for the gradients of tables and for tables of values."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import arguments
from .areas import LEFT, RIGHT
from .scores import columns_of, offsets_of

SUMS_WIDTH, SUMS_ROWS = tl.constexpr(arguments.SUMS_WIDTH), tl.constexpr(arguments.SUMS_ROWS)


class Ends(NamedTuple):
    """For each row, the sums at or beyond the first and the last column of a table."""

    left: Any
    right: Any


@triton.jit
def no_ends(BLOCK: tl.constexpr):
    """Return sums that start at zero."""
    return Ends(tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))


@triton.jit
def add_ends(ends, numbers, table, tile, pairs, AREA: tl.constexpr):
    """Add a tile of numbers to the ends."""
    left, right = ends.left, ends.right
    if AREA == LEFT:
        left += tl.sum(numbers, 1)
    elif AREA == RIGHT:
        right += tl.sum(numbers, 1)
    else:
        by_key, by_query = columns_of(tile, table.first, pairs)
        left += tl.sum(tl.where(by_key <= -by_query, numbers, 0.0), 1)
        right += tl.sum(tl.where(by_key >= tl.maximum(table.length - 1, 1) - by_query, numbers, 0.0), 1)
    return Ends(left, right)


@triton.jit
def store_ends(buffer, ends, pairs, place, rows):
    """Store the ends in a (batch, heads, 2, n_q) buffer."""
    at = buffer + (tl.cast(place.batch, tl.int64) * pairs.heads + place.head) * 2 * pairs.n_q + rows
    tl.store(at, ends.left, mask=rows < pairs.n_q)
    tl.store(at + pairs.n_q, ends.right, mask=rows < pairs.n_q)


@triton.jit
def row_of_sums(table, pairs, place, piece, rows):
    """Return the index of a row of SUMS_WIDTH columns of a table between its ends; see ``TableSums``."""
    pieces = tl.cdiv(table.length - 2, SUMS_WIDTH)
    in_all = tl.cdiv(pairs.n_q, SUMS_ROWS) * SUMS_ROWS
    return ((tl.cast(place.batch, tl.int64) * pairs.heads + place.head) * pieces + piece) * in_all + rows


@triton.jit
def add_at_offsets(buffer, numbers, table, tile, pairs):
    """Add a tile of numbers to the sums of a row at the columns between a table's ends; :func:`add_ends` sums the ends.

    With affine positions all keys of a row have different offsets, so a plain store is the sum. Each column takes the
    number of its key from shared memory, because then a thread's stores are at constant distances. Explicit positions
    may repeat, so keys of a block at the same position take turns.
    """
    if pairs.query_positions is None:
        M: tl.constexpr = tile.rows.numel
        N: tl.constexpr = tile.columns.numel
        low = (
            tile.first_key * pairs.key_stride
            + pairs.start
            - table.first
            - (tile.first_row + M - 1) * pairs.query_stride
        )
        high = low + (M - 1) * pairs.query_stride + (N - 1) * pairs.key_stride
        first = (tl.maximum(low, 1) - 1) // SUMS_WIDTH
        end = (tl.minimum(high, table.length - 2) + SUMS_WIDTH - 1) // SUMS_WIDTH
        flat = tl.reshape(numbers, [M * N])
        row = tl.arange(0, M)[:, None]
        in_piece = tl.arange(0, SUMS_WIDTH)[None, :]
        for piece in range(first, end):
            distance = 1 + piece * SUMS_WIDTH + in_piece - low - (M - 1 - row) * pairs.query_stride
            key = distance // pairs.key_stride
            # As a number without a sign, a key before the first is large.
            there = (distance.to(tl.uint32, bitcast=True) < N * pairs.key_stride) & (distance % pairs.key_stride == 0)
            found = tl.gather(flat, tl.reshape((row * N + key) & (M * N - 1), [M * SUMS_WIDTH]), 0)
            at = buffer + row_of_sums(table, pairs, tile.place, piece, tile.first_row) * SUMS_WIDTH
            tl.store(at + (row * SUMS_WIDTH + in_piece), tl.reshape(found, [M, SUMS_WIDTH]), mask=there)
    else:
        rows, columns = tile.rows, tile.columns
        column = offsets_of(tile, pairs) - table.first
        inside = (column > 0) & (column < table.length - 1) & (rows < pairs.n_q) & (columns < pairs.n_k)
        at_row = row_of_sums(table, pairs, tile.place, (column - 1) // SUMS_WIDTH, rows)
        at = buffer + at_row * SUMS_WIDTH + (column - 1) % SUMS_WIDTH
        at_key = pairs.key_ranks + tile.place.batch * pairs.key_positions_batch + columns
        ranks = tl.load(at_key, mask=columns < pairs.n_k, other=0)
        for turn in range(tl.max(ranks) + 1):
            now = inside & (ranks == turn)
            tl.store(at, tl.load(at, mask=now, other=0.0) + numbers, mask=now)
            tl.debug_barrier()
