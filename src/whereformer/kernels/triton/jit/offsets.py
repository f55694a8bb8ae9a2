"""Sums over a row's keys by offset, for the gradients of tables and for tables of values."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .areas import LEFT, RIGHT
from .tiles import row_index


class Ends(NamedTuple):
    """For each row, the sums at or beyond the first and the last column of a table."""

    left: Any
    right: Any


@triton.jit
def no_ends(BLOCK: tl.constexpr):
    """Return sums that start at zero."""
    return Ends(tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))


@triton.jit
def add_ends(ends, numbers, table, offsets, AREA: tl.constexpr):
    """Add a tile of numbers to the ends."""
    left, right = ends.left, ends.right
    if AREA == LEFT:
        left += tl.sum(numbers, 1)
    elif AREA == RIGHT:
        right += tl.sum(numbers, 1)
    else:
        column = offsets - table.first
        left += tl.sum(tl.where(column <= 0, numbers, 0.0), 1)
        right += tl.sum(tl.where((column > 0) & (column >= table.length - 1), numbers, 0.0), 1)
    return Ends(left, right)


@triton.jit
def store_ends(buffer, ends, table, pairs, place, rows):
    """Store the ends in the outer columns of a (batch, heads, n_q, length) buffer; a table may have only one column."""
    length = table.length
    at = buffer + row_index(pairs, place, rows) * length
    tl.store(at, tl.where(length == 1, ends.left + ends.right, ends.left), mask=rows < pairs.n_q)
    tl.store(at + length - 1, ends.right, mask=(rows < pairs.n_q) & (length > 1))


@triton.jit
def add_at_offsets(buffer, numbers, table, tile, offsets, pairs):
    """Do ``buffer[row, column] += numbers`` for the columns between a table's ends; :func:`add_ends` sums the ends.

    With affine positions all keys of a row have different offsets, so a plain store is the sum. Explicit positions may
    repeat, so keys of a block at the same position take turns.
    """
    rows, columns = tile.rows, tile.columns
    column = offsets - table.first
    inside = (column > 0) & (column < table.length - 1) & (rows < pairs.n_q) & (columns < pairs.n_k)
    at = buffer + row_index(pairs, tile.place, tile.first_row) * table.length
    at = at + ((rows - tile.first_row) * table.length + column)
    if pairs.query_positions is None:
        tl.store(at, numbers, mask=inside)
    else:
        at_key = pairs.key_ranks + tile.place.batch * pairs.key_positions_batch + columns
        ranks = tl.load(at_key, mask=columns < pairs.n_k, other=0)
        for turn in range(tl.max(ranks) + 1):
            now = inside & (ranks == turn)
            tl.store(at, tl.load(at, mask=now, other=0.0) + numbers, mask=now)
            tl.debug_barrier()
