"""Products with tables of vectors over offsets, and the gradients of such tables."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .offsets import SUMS_ROWS, SUMS_WIDTH
from .tiles import BatchHead, load


@triton.jit(do_not_specialize=["n", "heads", "length"])
def products(rows, table, out, zeros, scale, times, n, heads, length, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply ROWS rows of one head with all vectors of a table, and fill the rows' sums by offset with zeros."""
    blocks = tl.cdiv(n, SUMS_ROWS) * (SUMS_ROWS // ROWS)
    program = tl.program_id(0)
    place = BatchHead(program // blocks // heads, program // blocks % heads)
    first_row = program % blocks * ROWS
    head = tl.cast(place.batch, tl.int64) * heads + place.head
    row = first_row + tl.arange(0, ROWS)[:, None]
    if out is not None:
        r = load(rows, place, first_row, n, ROWS).to(tl.float32) * scale  # [ROWS, width]
        for first in range(0, length, ROWS):
            vectors = load(table, place, first, length, ROWS).to(tl.float32) * times  # [ROWS, width]
            found = tl.dot(r, tl.trans(vectors), input_precision=PRECISION)  # [ROWS, ROWS]
            column = first + tl.arange(0, ROWS)[None, :]
            at = out + (head * n + row) * length + column
            tl.store(at, found, mask=(row < n) & (column < length))
    if zeros is not None:
        pieces = tl.cdiv(length - 2, SUMS_WIDTH)
        for piece in range(pieces):
            at = zeros + ((head * pieces + piece) * blocks * ROWS + row) * SUMS_WIDTH
            tl.store(at + tl.arange(0, SUMS_WIDTH)[None, :], tl.zeros([ROWS, SUMS_WIDTH], tl.float32))


@triton.jit(do_not_specialize=["n", "heads", "length"])
def table_gradients(rows, ends, sums, out, scale, n, heads, length, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Compute what one head contributes to SUMS_WIDTH vectors of a table's gradient, or to the first and the last.

    With the sums s by offset and the rows r that the table's vectors meet, dT[o] = sum_i s[i, o] * r[i].
    """
    pieces = tl.cdiv(length - 2, SUMS_WIDTH)
    program = tl.program_id(0)
    place = BatchHead(program // (pieces + 1) // heads, program // (pieces + 1) % heads)
    piece = program % (pieces + 1)
    head = tl.cast(place.batch, tl.int64) * heads + place.head
    in_all = tl.cdiv(n, SUMS_ROWS) * SUMS_ROWS
    column = tl.arange(0, rows.padded)
    at = out + head * length * rows.width + column
    if piece == pieces:
        left = tl.zeros([rows.padded], tl.float32)
        right = tl.zeros([rows.padded], tl.float32)
        for first in range(0, n, ROWS):
            row = first + tl.arange(0, ROWS)
            there = row < n
            r = load(rows, place, first, n, ROWS).to(tl.float32) * scale  # [ROWS, width]
            of_left = tl.load(ends + head * 2 * n + row, mask=there, other=0.0)
            of_right = tl.load(ends + (head * 2 + 1) * n + row, mask=there, other=0.0)
            left += tl.sum(of_left[:, None] * r, 0)
            right += tl.sum(of_right[:, None] * r, 0)
        if length == 1:
            left += right
        tl.store(at, left, mask=column < rows.width)
        if length > 1:
            tl.store(at + (length - 1) * rows.width, right, mask=column < rows.width)
    else:
        total = tl.zeros([SUMS_WIDTH, rows.padded], tl.float32)
        for first in range(0, n, ROWS):
            r = load(rows, place, first, n, ROWS).to(tl.float32) * scale  # [ROWS, width]
            row = first + tl.arange(0, ROWS)[:, None]
            of_row = sums + ((head * pieces + piece) * in_all + row) * SUMS_WIDTH + tl.arange(0, SUMS_WIDTH)[None, :]
            total = tl.dot(tl.trans(tl.load(of_row)), r, total, input_precision=PRECISION)
        vector = piece * SUMS_WIDTH + tl.arange(0, SUMS_WIDTH)[:, None]
        mask = (vector < length - 2) & (column[None, :] < rows.width)
        tl.store(at[None, :] + (vector + 1) * rows.width, total, mask=mask)
