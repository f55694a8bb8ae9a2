"""Tables of vectors: their products with rows, sums over a row's keys by offset, and the tables' gradients from these.

A bias has sums beyond the ends of its table, too.
"""

# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from .. import arguments
from .areas import LEFT, RIGHT
from .scores import compute_offsets, find_columns
from .tiles import BatchHead, head_index, load

SUMS_WIDTH, SUMS_ROWS = tl.constexpr(arguments.SUMS_WIDTH), tl.constexpr(arguments.SUMS_ROWS)


class Ends(NamedTuple):
    """For each row, the sums at or beyond the first and the last column of a table, (BLOCK,)."""

    left: tl.tensor
    right: tl.tensor


@triton.jit
def zero_ends(BLOCK: tl.constexpr):
    """Return sums that start at zero."""
    return Ends(tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))


@triton.jit
def add_ends(ends, numbers, first, length, tile, pairs, AREA: tl.constexpr):
    """Add a tile of numbers, summed over the second axis, to the ends of a table from the offset ``first`` on."""
    left, right = ends.left, ends.right
    if AREA == LEFT:
        left += tl.sum(numbers, 1)  # (BLOCK,)
    elif AREA == RIGHT:
        right += tl.sum(numbers, 1)
    else:
        by_key, by_query = find_columns(tile, first, pairs)
        left += tl.sum(tl.where(by_key <= -by_query, numbers, 0.0), 1)  # (BLOCK,)
        right += tl.sum(tl.where(by_key >= tl.maximum(length - 1, 1) - by_query, numbers, 0.0), 1)
    return Ends(left, right)


@triton.jit
def store_ends(buffer, ends, pairs, batch_head, rows, n):
    """Store the ends of some of n rows in a (batch, heads, 2, n) buffer."""
    pointers = buffer + head_index(pairs, batch_head) * 2 * n + rows  # rows.shape
    tl.store(pointers, ends.left, mask=rows < n)
    tl.store(pointers + n, ends.right, mask=rows < n)


@triton.jit
def add_vectors(acc, ends, sums, vectors, table, terms, pairs, batch_head, first_row, dtype, BLOCK_M: tl.constexpr):
    """Add to some queries' rows the vectors of a table times the queries' sums by offset, in a dtype.

    ``acc[i] += sum_o sums[i, o] * vectors[o]``, with ``vectors`` (batch, heads, T, dim), and ``sums`` the rows of
    ``TableSums``, except for the first and the last offset, which are ``ends``.
    """
    length = table.length
    acc += ends.left[:, None] * load(vectors, batch_head, 0, length, 1).to(dtype).to(tl.float32)  # (BLOCK_M, dim)
    acc += ends.right[:, None] * load(vectors, batch_head, length - 1, length, 1).to(dtype).to(tl.float32)
    # Threads read what other threads have stored.
    tl.debug_barrier()
    for piece in range(tl.cdiv(length - 2, SUMS_WIDTH)):
        pointers = sums + find_sums_row(table, pairs, batch_head, piece, first_row, pairs.n_q) * SUMS_WIDTH
        flat = tl.load(pointers + tl.arange(0, BLOCK_M * SUMS_WIDTH))  # (BLOCK_M * SUMS_WIDTH,)
        piece_sums = tl.reshape(flat, [BLOCK_M, SUMS_WIDTH]).to(dtype)
        piece_vectors = load(vectors, batch_head, 1 + piece * SUMS_WIDTH, length - 1, SUMS_WIDTH)  # (SUMS_WIDTH, dim)
        acc = tl.dot(piece_sums, piece_vectors.to(dtype), acc, input_precision=terms.products.precision)
    return acc


@triton.jit
def find_sums_row(table, pairs, batch_head, piece, rows, n):
    """Return the index of a row, of n, of SUMS_WIDTH columns of a table between its ends; see ``TableSums``."""
    pieces = tl.cdiv(table.length - 2, SUMS_WIDTH)
    piece_rows = tl.cdiv(n, SUMS_ROWS) * SUMS_ROWS
    return (head_index(pairs, batch_head) * pieces + piece) * piece_rows + rows


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
        low = tile.first_key * pairs.key_stride + pairs.start - table.first
        low = low - (tile.first_row + M - 1) * pairs.query_stride
        high = low + (M - 1) * pairs.query_stride + (N - 1) * pairs.key_stride
        start = (tl.maximum(low, 1) - 1) // SUMS_WIDTH
        end = (tl.minimum(high, table.length - 2) + SUMS_WIDTH - 1) // SUMS_WIDTH
        ROWS: tl.constexpr = N if BY_KEY else M
        KEYS: tl.constexpr = M if BY_KEY else N
        STRIDE: tl.constexpr = pairs.query_stride if BY_KEY else pairs.key_stride
        flat = tl.reshape(numbers, [M * N])
        row = tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
        piece_column = tl.arange(0, SUMS_WIDTH)[None, :]  # (1, SUMS_WIDTH)
        for piece in range(start, end):
            column = 1 + piece * SUMS_WIDTH + piece_column  # (1, SUMS_WIDTH)
            if BY_KEY:
                distance = low + (M - 1) * pairs.query_stride + row * pairs.key_stride - column  # (ROWS, SUMS_WIDTH)
                first_row = find_sums_row(table, pairs, tile.batch_head, piece, tile.first_key, pairs.n_k)
            else:
                distance = column - low - (M - 1 - row) * pairs.query_stride  # (ROWS, SUMS_WIDTH)
                first_row = find_sums_row(table, pairs, tile.batch_head, piece, tile.first_row, pairs.n_q)
            base = buffer + first_row * SUMS_WIDTH
            key = distance // STRIDE  # (ROWS, SUMS_WIDTH)
            # As a number without a sign, a key before the first is large.
            is_key = (distance.to(tl.uint32, bitcast=True) < KEYS * STRIDE) & (distance % STRIDE == 0)
            sums = tl.gather(flat, tl.reshape((row * KEYS + key) & (M * N - 1), [ROWS * SUMS_WIDTH]), 0)
            tl.store(base + (row * SUMS_WIDTH + piece_column), tl.reshape(sums, [ROWS, SUMS_WIDTH]), mask=is_key)
    else:
        rows, columns = tile.rows, tile.columns
        column = compute_offsets(tile, pairs) - table.first  # TILE
        inside = (column > 0) & (column < table.length - 1) & (rows < pairs.n_q) & (columns < pairs.n_k)  # TILE
        if BY_KEY:
            sums_row = find_sums_row(table, pairs, tile.batch_head, (column - 1) // SUMS_WIDTH, columns, pairs.n_k)
            rank_pointers = pairs.query_ranks + tile.batch_head.batch * pairs.query_positions_stride + rows
            ranks = tl.load(rank_pointers, mask=rows < pairs.n_q, other=0)  # rows.shape
        else:
            sums_row = find_sums_row(table, pairs, tile.batch_head, (column - 1) // SUMS_WIDTH, rows, pairs.n_q)
            rank_pointers = pairs.key_ranks + tile.batch_head.batch * pairs.key_positions_stride + columns
            ranks = tl.load(rank_pointers, mask=columns < pairs.n_k, other=0)  # columns.shape
        pointers = buffer + sums_row * SUMS_WIDTH + (column - 1) % SUMS_WIDTH  # TILE
        for turn in range(tl.max(ranks) + 1):
            has_turn = inside & (ranks == turn)  # TILE
            tl.store(pointers, tl.load(pointers, mask=has_turn, other=0.0) + numbers, mask=has_turn)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["n", "heads", "length"])
def products(rows, table, out, zeros, scale, times, n, heads, length, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply ROWS rows of one head with all vectors of a table, and fill the rows' sums by offset with zeros.

    ``out[i, o] = (scale * rows[i]) . (times * table[o])``.
    """
    blocks = tl.cdiv(n, SUMS_ROWS) * (SUMS_ROWS // ROWS)
    program = tl.program_id(0)
    batch_head = BatchHead(program // blocks // heads, program // blocks % heads)
    first_row = program % blocks * ROWS
    head = tl.cast(batch_head.batch, tl.int64) * heads + batch_head.head
    row = first_row + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    if out is not None:
        r = load(rows, batch_head, first_row, n, ROWS).to(tl.float32) * scale  # (ROWS, dim)
        for first_column in range(0, length, ROWS):
            vectors = load(table, batch_head, first_column, length, ROWS).to(tl.float32) * times  # (ROWS, dim)
            numbers = tl.dot(r, tl.trans(vectors), input_precision=PRECISION)  # (ROWS, ROWS)
            column = first_column + tl.arange(0, ROWS)[None, :]  # (1, ROWS)
            pointers = out + (head * n + row) * length + column  # (ROWS, ROWS)
            tl.store(pointers, numbers, mask=(row < n) & (column < length))
    if zeros is not None:
        pieces = tl.cdiv(length - 2, SUMS_WIDTH)
        for piece in range(pieces):
            pointers = zeros + ((head * pieces + piece) * blocks * ROWS + row) * SUMS_WIDTH  # (ROWS, 1)
            tl.store(pointers + tl.arange(0, SUMS_WIDTH)[None, :], tl.zeros([ROWS, SUMS_WIDTH], tl.float32))


@triton.jit(do_not_specialize=["n", "heads", "length"])
def table_gradients(rows, ends, sums, out, scale, n, heads, length, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Compute one head's share of SUMS_WIDTH vectors of a table's gradient, or of the first and the last.

    ``out[o] = sum_i sums[i, o] * scale * rows[i]``: the table is multiplied with ``rows``. ``ends`` and ``sums`` are
    the fields of ``TableSums``.
    """
    pieces = tl.cdiv(length - 2, SUMS_WIDTH)
    program = tl.program_id(0)
    batch_head = BatchHead(program // (pieces + 1) // heads, program // (pieces + 1) % heads)
    piece = program % (pieces + 1)
    head = tl.cast(batch_head.batch, tl.int64) * heads + batch_head.head
    piece_rows = tl.cdiv(n, SUMS_ROWS) * SUMS_ROWS
    column = tl.arange(0, rows.padded_width)  # (dim,)
    pointers = out + head * length * rows.width + column  # (dim,)
    if piece == pieces:
        left = tl.zeros([rows.padded_width], tl.float32)  # (dim,)
        right = tl.zeros([rows.padded_width], tl.float32)  # (dim,)
        for first_row in range(0, n, ROWS):
            row = first_row + tl.arange(0, ROWS)  # (ROWS,)
            in_range = row < n
            r = load(rows, batch_head, first_row, n, ROWS).to(tl.float32) * scale  # (ROWS, dim)
            left_sums = tl.load(ends + head * 2 * n + row, mask=in_range, other=0.0)  # (ROWS,)
            right_sums = tl.load(ends + (head * 2 + 1) * n + row, mask=in_range, other=0.0)  # (ROWS,)
            left += tl.sum(left_sums[:, None] * r, 0)
            right += tl.sum(right_sums[:, None] * r, 0)
        if length == 1:
            left += right
        tl.store(pointers, left, mask=column < rows.width)
        if length > 1:
            tl.store(pointers + (length - 1) * rows.width, right, mask=column < rows.width)
    else:
        total = tl.zeros([SUMS_WIDTH, rows.padded_width], tl.float32)  # (SUMS_WIDTH, dim)
        for first_row in range(0, n, ROWS):
            r = load(rows, batch_head, first_row, n, ROWS).to(tl.float32) * scale  # (ROWS, dim)
            row = first_row + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
            sums_row = sums + ((head * pieces + piece) * piece_rows + row) * SUMS_WIDTH  # (ROWS, 1)
            piece_sums = tl.load(sums_row + tl.arange(0, SUMS_WIDTH)[None, :])  # (ROWS, SUMS_WIDTH)
            total = tl.dot(tl.trans(piece_sums), r, total, input_precision=PRECISION)  # (SUMS_WIDTH, dim)
        vector = piece * SUMS_WIDTH + tl.arange(0, SUMS_WIDTH)[:, None]  # (SUMS_WIDTH, 1)
        mask = (vector < length - 2) & (column[None, :] < rows.width)  # (SUMS_WIDTH, dim)
        tl.store(pointers[None, :] + (vector + 1) * rows.width, total, mask=mask)
