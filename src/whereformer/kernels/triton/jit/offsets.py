"""Tables of vectors: their products with rows, sums over a row's keys by offset, and what these give the tables.

The sums beyond the ends of a table are those of a bias, too.
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import arguments
from .areas import LEFT, RIGHT
from .scores import columns_of, offsets_of
from .tiles import BatchHead, head_index, load

SUMS_WIDTH, SUMS_ROWS = tl.constexpr(arguments.SUMS_WIDTH), tl.constexpr(arguments.SUMS_ROWS)


class Columns(NamedTuple):
    """The columns of a table: the offset of the first, and their number."""

    first: Any
    length: Any


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
def store_ends(buffer, ends, pairs, place, rows, n):
    """Store the ends of some of n rows in a (batch, heads, 2, n) buffer."""
    at = buffer + head_index(pairs, place) * 2 * n + rows
    tl.store(at, ends.left, mask=rows < n)
    tl.store(at + n, ends.right, mask=rows < n)


@triton.jit
def add_vectors(acc, ends, sums, vectors, table, terms, pairs, place, first_row, dtype, BLOCK_M: tl.constexpr):
    """Add to some queries' rows the vectors of a table times the queries' sums by offset, in a dtype.

    ``vectors`` is (batch, heads, T, dim), and ``sums`` the rows of ``TableSums``.
    """
    length = table.length
    acc += ends.left[:, None] * load(vectors, place, 0, length, 1).to(dtype).to(tl.float32)
    acc += ends.right[:, None] * load(vectors, place, length - 1, length, 1).to(dtype).to(tl.float32)
    # Threads read what other threads have stored.
    tl.debug_barrier()
    for piece in range(tl.cdiv(length - 2, SUMS_WIDTH)):
        at = sums + row_of_sums(table, pairs, place, piece, first_row, pairs.n_q) * SUMS_WIDTH
        found = tl.reshape(tl.load(at + tl.arange(0, BLOCK_M * SUMS_WIDTH)), [BLOCK_M, SUMS_WIDTH]).to(dtype)
        some = load(vectors, place, 1 + piece * SUMS_WIDTH, length - 1, SUMS_WIDTH).to(dtype)
        acc = tl.dot(found, some, acc, input_precision=terms.products.precision)
    return acc


@triton.jit
def row_of_sums(table, pairs, place, piece, rows, n):
    """Return the index of a row, of n, of SUMS_WIDTH columns of a table between its ends; see ``TableSums``."""
    pieces = tl.cdiv(table.length - 2, SUMS_WIDTH)
    in_all = tl.cdiv(n, SUMS_ROWS) * SUMS_ROWS
    return (head_index(pairs, place) * pieces + piece) * in_all + rows


@triton.jit
def add_at_offsets(buffer, numbers, table, tile, pairs, BY_KEY: tl.constexpr = False):
    """Add a tile of numbers to the sums of a row at the columns between a table's ends; :func:`add_ends` sums the ends.

    Each query has a row; BY_KEY, each key has one, the tile is transposed, and keys and queries change places below.
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
        ROWS: tl.constexpr = N if BY_KEY else M
        OTHERS: tl.constexpr = M if BY_KEY else N
        STRIDE: tl.constexpr = pairs.query_stride if BY_KEY else pairs.key_stride
        flat = tl.reshape(numbers, [M * N])
        row = tl.arange(0, ROWS)[:, None]
        in_piece = tl.arange(0, SUMS_WIDTH)[None, :]
        for piece in range(first, end):
            column = 1 + piece * SUMS_WIDTH + in_piece
            if BY_KEY:
                distance = low + (M - 1) * pairs.query_stride + row * pairs.key_stride - column
                at = buffer + row_of_sums(table, pairs, tile.place, piece, tile.first_key, pairs.n_k) * SUMS_WIDTH
            else:
                distance = column - low - (M - 1 - row) * pairs.query_stride
                at = buffer + row_of_sums(table, pairs, tile.place, piece, tile.first_row, pairs.n_q) * SUMS_WIDTH
            other = distance // STRIDE
            # As a number without a sign, a key before the first is large.
            there = (distance.to(tl.uint32, bitcast=True) < OTHERS * STRIDE) & (distance % STRIDE == 0)
            found = tl.gather(flat, tl.reshape((row * OTHERS + other) & (M * N - 1), [ROWS * SUMS_WIDTH]), 0)
            tl.store(at + (row * SUMS_WIDTH + in_piece), tl.reshape(found, [ROWS, SUMS_WIDTH]), mask=there)
    else:
        rows, columns = tile.rows, tile.columns
        column = offsets_of(tile, pairs) - table.first
        inside = (column > 0) & (column < table.length - 1) & (rows < pairs.n_q) & (columns < pairs.n_k)
        if BY_KEY:
            at_row = row_of_sums(table, pairs, tile.place, (column - 1) // SUMS_WIDTH, columns, pairs.n_k)
            at_query = pairs.query_ranks + tile.place.batch * pairs.query_positions_batch + rows
            ranks = tl.load(at_query, mask=rows < pairs.n_q, other=0)
        else:
            at_row = row_of_sums(table, pairs, tile.place, (column - 1) // SUMS_WIDTH, rows, pairs.n_q)
            at_key = pairs.key_ranks + tile.place.batch * pairs.key_positions_batch + columns
            ranks = tl.load(at_key, mask=columns < pairs.n_k, other=0)
        at = buffer + at_row * SUMS_WIDTH + (column - 1) % SUMS_WIDTH
        for turn in range(tl.max(ranks) + 1):
            now = inside & (ranks == turn)
            tl.store(at, tl.load(at, mask=now, other=0.0) + numbers, mask=now)
            tl.debug_barrier()


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
