"""The Triton kernels of ``backend="triton"``: one tile of scores at a time, nothing of size n_q x n_k in memory.

Throughout, a *tile* is BLOCK_M queries by BLOCK_N keys (transposed in the kernel of the keys' gradients, so that its
products need no transposed operand), and scores are in units of log2, because exp2 is what the hardware has.

Offset tables are constant beyond their ends, so the tiles of a row of tiles fall into areas: LEFT of every table and
RIGHT of every table, where a table is one number per head (or row), INSIDE, where it is read pair by pair, and ANY,
where nothing is known: there offsets are clamped, and keys beyond the end and future keys are masked. With affine
positions the areas follow from the tile's place and each has a loop of its own; with explicit positions all is ANY.
EDGE is INSIDE, but masked like ANY.

Nothing is added to memory that another program adds to as well, so that results are the same bits from run to run.
"""

# mypy: ignore-errors
# Kernels are a language of their own that only looks like Python.

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LEFT, INSIDE, RIGHT = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)
ANY, EDGE = tl.constexpr(2), tl.constexpr(3)
LOWEST = tl.constexpr(-2.3586e38)  # times log2(e), this is still a finite float32


class Rows(NamedTuple):
    """A (batch, heads, n, width) tensor with a contiguous last axis: its data (or None) and its strides."""

    data: Any
    batch: Any
    head: Any
    row: Any


class Dense(NamedTuple):
    """A (batch, heads, n_q, n_k) tensor: its data (or None) and its strides."""

    data: Any
    batch: Any
    head: Any
    row: Any
    column: Any


class Pairs(NamedTuple):
    """Which queries meet which keys, at which offset, and which weights drop."""

    n_q: Any
    n_k: Any
    heads: Any
    start: Any  # the offset of the first key and the first query; 0 where positions are explicit
    query_stride: Any  # the strides are constants of the compiler
    key_stride: Any
    query_positions: Any  # None where positions are affine
    query_positions_batch: Any
    key_positions: Any
    key_positions_batch: Any
    key_ranks: Any  # how many earlier keys of the same block have the same position
    key_mask: Any
    key_end: Any  # per batch, one more than the last key that may be attended
    query_documents: Any
    key_documents: Any
    dropout_keys: Any
    dropout_threshold: Any
    dropout_scale: Any


class Norm(NamedTuple):
    """What makes a row's scores its weights, ``exp2(scores - shift - log_sum)``; each (batch, heads, n_q).

    ``log_sum`` is None where ``shift`` holds the sum of both: one number fewer in memory and registers. It is kept
    apart where terms may add large numbers, beside which it would be rounded away.
    """

    shift: Any  # inf in rows that may attend nothing
    log_sum: Any


class Terms(NamedTuple):
    """Offset tables; those of vectors are products with the rows that they meet, (batch, heads, n_q, T)."""

    first: Any  # all tables are constant below this offset,
    last: Any  # and above this one
    bias: Any  # (heads, bias_row), padded so that no tile INSIDE reads beyond its ends
    bias_row: Any
    bias_shift: Any  # the offset of the first column, padding included
    bias_first: Any  # the offset of the first column, and how many there are, without the padding
    bias_length: Any
    key_products: Any
    keys_first: Any
    keys_length: Any
    value_products: Any
    values_first: Any
    values_length: Any


# --- tiles


@triton.jit
def _tile_pointers(matrix, batch, head, first, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    base = matrix.data + tl.cast(batch, tl.int64) * matrix.batch + tl.cast(head, tl.int64) * matrix.head
    base += tl.cast(first, tl.int64) * matrix.row
    return base + tl.arange(0, BLOCK)[:, None] * matrix.row + tl.arange(0, PADDED)[None, :]


@triton.jit
def _tile_mask(first, n, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    mask = tl.arange(0, BLOCK)[:, None] < n - first
    if WIDTH != PADDED:
        mask = mask & (tl.arange(0, PADDED)[None, :] < WIDTH)
    return mask


@triton.jit
def _load(matrix, batch, head, first, n, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows from ``first`` on, (BLOCK, PADDED), zeros beyond row n and beyond WIDTH; a mere 0 if there is no matrix."""
    if matrix.data is None:
        return 0.0
    else:
        pointers = _tile_pointers(matrix, batch, head, first, BLOCK, PADDED)
        return tl.load(pointers, mask=_tile_mask(first, n, BLOCK, WIDTH, PADDED), other=0.0)


@triton.jit
def _store(matrix, tile, batch, head, first, n, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    pointers = _tile_pointers(matrix, batch, head, first, BLOCK, PADDED)
    mask = _tile_mask(first, n, BLOCK, WIDTH, PADDED)
    tl.store(pointers, tile.to(matrix.data.dtype.element_ty), mask=mask)


@triton.jit
def _row_index(pairs, batch, head, rows):
    """Where rows are in a (batch, heads, n_q) tensor."""
    return (tl.cast(batch, tl.int64) * pairs.heads + head) * pairs.n_q + rows


@triton.jit
def _load_rows(data, pairs, batch, head, rows, other):
    """One number per row, ``other`` for rows beyond the last."""
    return tl.load(data + _row_index(pairs, batch, head, rows), mask=rows < pairs.n_q, other=other)


@triton.jit
def _load_norm(norm, pairs, batch, head, rows):
    """A row's shift and log_sum. Rows beyond the last have an infinite shift and so no weights."""
    shift = _load_rows(norm.shift, pairs, batch, head, rows, float("inf"))
    if norm.log_sum is None:
        return shift, 0.0
    else:
        return shift, _load_rows(norm.log_sum, pairs, batch, head, rows, 0.0)


# --- scores


@triton.jit
def _offsets(pairs, batch, rows, columns):
    """The offsets of a tile; rows and columns broadcast, so that tiles may be transposed."""
    if pairs.query_positions is None:
        return columns * pairs.key_stride - rows * pairs.query_stride + pairs.start
    else:
        query_at = pairs.query_positions + batch * pairs.query_positions_batch + rows
        key_at = pairs.key_positions + batch * pairs.key_positions_batch + columns
        query_positions = tl.load(query_at, mask=rows < pairs.n_q, other=0)
        return tl.load(key_at, mask=columns < pairs.n_k, other=0) - query_positions


@triton.jit
def _clamped(column, length):
    return tl.minimum(tl.maximum(column, 0), length - 1)


@triton.jit
def _from_row_table(data, first, length, pairs, batch, head, rows, offsets, AREA: tl.constexpr):
    """What a (batch, heads, n_q, length) table says about each pair of a tile."""
    at = data + _row_index(pairs, batch, head, rows) * length
    if AREA == RIGHT:
        at += length - 1
    elif AREA != LEFT:
        at = at + _clamped(offsets - first, length)
    return tl.load(at, mask=rows < pairs.n_q, other=0.0)


@triton.jit
def _scores(
    left,
    right,
    left_factors,
    right_factors,
    terms,
    dense,
    pairs,
    scale,
    batch,
    head,
    first_row,
    first_key,
    rows,
    columns,
    CAUSAL: tl.constexpr,
    AREA: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The scores of a tile, -inf where a pair may not attend. ``scale`` includes log2(e).

    A product and a sum are one rounding or two as the compiler likes. Beside a large number that makes different
    scores, and forward and backward must make the same; so what meets large numbers is said as one.
    """
    SCALED_WITH_BIAS: tl.constexpr = terms.bias is not None and not left_factors.type.is_block()
    if left.type.is_block():
        scores = tl.dot(left, tl.trans(right), input_precision="ieee")
        if not SCALED_WITH_BIAS:
            scores *= scale
    else:
        scores = tl.zeros([HEIGHT, WIDTH], tl.float32)
    if left_factors.type.is_block():
        factors = tl.dot(left_factors, tl.trans(right_factors), input_precision="ieee")
        scores = tl.fma(factors, LOG2E, scores)
    offsets = _offsets(pairs, batch, rows, columns)
    # No key has a negative index, but Triton's pipeliner would stage the loads of a loop's own body through shared
    # memory: for what is gathered number by number, that is room and time for nothing.
    if first_key >= 0:
        if terms.bias is not None:
            table = terms.bias + head * terms.bias_row
            if AREA == LEFT:
                bias = tl.load(table)
            elif AREA == RIGHT:
                bias = tl.load(table + terms.bias_row - 1)
            elif AREA == ANY:
                bias = tl.load(table + _clamped(offsets - terms.bias_shift, terms.bias_row))
            else:
                # One address for the tile and small distances from it, which the compiler makes part of the loads.
                corner = pairs.start + first_key * pairs.key_stride - first_row * pairs.query_stride - terms.bias_shift
                at = table + corner + (columns - first_key) * pairs.key_stride
                bias = tl.load(at - (rows - first_row) * pairs.query_stride)
            if SCALED_WITH_BIAS:
                scores = tl.fma(scores, scale, bias)
            else:
                scores += bias
        if terms.key_products is not None:
            scores += _from_row_table(
                *(terms.key_products, terms.keys_first, terms.keys_length, pairs, batch, head, rows, offsets, AREA)
            )
        if dense.data is not None:
            at = dense.data + tl.cast(batch, tl.int64) * dense.batch + tl.cast(head, tl.int64) * dense.head
            at = at + rows.to(tl.int64) * dense.row + columns.to(tl.int64) * dense.column
            added = tl.load(at, mask=(rows < pairs.n_q) & (columns < pairs.n_k), other=0.0).to(tl.float32)
            # The smallest finite number stays finite: -inf alone forbids a pair.
            added = tl.where(added == float("-inf"), added, tl.maximum(added, LOWEST))
            scores = tl.fma(added, LOG2E, scores)
    if AREA >= ANY:
        allowed = columns < pairs.n_k
        if CAUSAL:
            allowed = allowed & (offsets <= 0)
        scores = tl.where(allowed, scores, float("-inf"))
    if pairs.key_mask is not None:
        may = tl.load(pairs.key_mask + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(may != 0, scores, float("-inf"))
    if pairs.query_documents is not None:
        document = tl.load(pairs.query_documents + batch * pairs.n_q + rows, mask=rows < pairs.n_q, other=0)
        same = document == tl.load(pairs.key_documents + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(same, scores, float("-inf"))
    return scores


@triton.jit
def _kept(pairs, batch, head, rows, columns):
    """Which weights survive dropout: dropout.py's keep_mask."""
    mixed = _load_rows(pairs.dropout_keys, pairs, batch, head, rows, 0).to(tl.uint32, bitcast=True)
    mixed = mixed + columns.to(tl.uint32) * 0x9E3779B9
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return mixed >= tl.cast(pairs.dropout_threshold, tl.uint32)


# --- where the areas of a row (or a column) of tiles begin and end


@triton.jit
def _blocks_up_to(limit, stride, BLOCK: tl.constexpr):
    """How many leading blocks have ``index * stride <= limit`` for all their indices."""
    return (tl.maximum(limit, -1) // stride + 1) // BLOCK


@triton.jit
def _first_block_from(limit, stride, BLOCK: tl.constexpr):
    """The first block with ``index * stride >= limit`` for all its indices."""
    return (tl.maximum(limit, 0) + stride * BLOCK - 1) // (stride * BLOCK)


@triton.jit
def _key_areas(terms, pairs, batch, first_row, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the key blocks of a query block change area: LEFT, INSIDE, RIGHT, ANY end here; and what is INSIDE or ANY.

    Returns (left_end, inside_end, right_end, end, band_end): the last says where RIGHT would begin without the others.
    """
    end = tl.cdiv(pairs.n_k, BLOCK_N)
    if pairs.query_positions is None:
        # A key block's smallest and largest offset: its first key from the last row, its last key from the first row.
        low = pairs.start - (first_row + BLOCK_M - 1) * pairs.query_stride
        high = pairs.start - first_row * pairs.query_stride
        full = pairs.n_k // BLOCK_N
        if CAUSAL:
            end = tl.minimum(end, _first_block_from(1 - low, pairs.key_stride, BLOCK_N))
            full = tl.minimum(full, _blocks_up_to(-high, pairs.key_stride, BLOCK_N))
        if pairs.key_end is not None:
            end = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK_N))
        full = tl.minimum(full, end)
        left_end = full * 0
        inside_end = full
        band_end = end
        if terms.first is not None:
            left_end = tl.minimum(_blocks_up_to(terms.first - high, pairs.key_stride, BLOCK_N), full)
            band_end = _first_block_from(terms.last - low, pairs.key_stride, BLOCK_N)
            band_end = tl.minimum(tl.maximum(band_end, left_end), end)
            inside_end = tl.minimum(band_end, full)
        return left_end, inside_end, full, end, band_end
    else:
        if pairs.key_end is not None:
            end = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK_N))
        return end * 0, end * 0, end * 0, end, end


# --- sums over the keys of a row that share an offset


@triton.jit
def _add_at_offsets(buffer, tile, first, length, pairs, batch, head, rows, columns, offsets):
    """buffer[row, column] += tile for the columns inside the table; its ends are summed in registers.

    Affine positions put all keys of a row at different offsets, so there a plain store is the sum. Explicit ones may
    repeat: keys of a block at the same position take turns.
    """
    column = offsets - first
    inside = (column > 0) & (column < length - 1) & (rows < pairs.n_q) & (columns < pairs.n_k)
    at = buffer + _row_index(pairs, batch, head, rows) * length + column
    if pairs.query_positions is None:
        tl.store(at, tile, mask=inside)
    else:
        at_key = pairs.key_ranks + batch * pairs.key_positions_batch + columns
        ranks = tl.load(at_key, mask=columns < pairs.n_k, other=0)
        for turn in range(tl.max(ranks) + 1):
            now = inside & (ranks == turn)
            tl.store(at, tl.load(at, mask=now, other=0.0) + tile, mask=now)
            tl.debug_barrier()


@triton.jit
def _add_ends(left, right, tile, first, length, offsets, AREA: tl.constexpr):
    """Row sums of what lies at or beyond the first and the last column of a table."""
    if AREA == LEFT:
        left += tl.sum(tile, 1)
    elif AREA == RIGHT:
        right += tl.sum(tile, 1)
    else:
        column = offsets - first
        left += tl.sum(tl.where(column <= 0, tile, 0.0), 1)
        right += tl.sum(tl.where((column > 0) & (column >= length - 1), tile, 0.0), 1)
    return left, right


@triton.jit
def _store_ends(buffer, left, right, length, pairs, batch, head, rows):
    """The sums of :func:`_add_ends` into the outer columns; a table of one column has but one."""
    at = buffer + _row_index(pairs, batch, head, rows) * length
    tl.store(at, tl.where(length == 1, left + right, left), mask=rows < pairs.n_q)
    tl.store(at + length - 1, right, mask=(rows < pairs.n_q) & (length > 1))


# --- forward


@triton.jit
def _attend_blocks(
    out,
    peak,
    total,
    left,
    right,
    q,
    factors,
    key,
    value,
    key_factors,
    terms,
    dense,
    pairs,
    scale,
    batch,
    head,
    first_row,
    rows,
    start,
    end,
    CAUSAL: tl.constexpr,
    AREA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """Online softmax over the key blocks from ``start`` to ``end``."""
    for block in range(start, end):
        first = block * BLOCK_N
        columns = (first + tl.arange(0, BLOCK_N))[None, :]
        k = _load(key, batch, head, first, pairs.n_k, BLOCK_N, HEAD_DIM, D)
        fk = _load(key_factors, batch, head, first, pairs.n_k, BLOCK_N, RANK, R)
        scores = _scores(
            *(q, k, factors, fk, terms, dense, pairs, scale, batch, head, first_row, first, rows, columns),
            *(CAUSAL, AREA, BLOCK_M, BLOCK_N),
        )
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Rows that may attend nothing so far have no peak; any finite number gives them weights of 0.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - reference)
        weights = tl.exp2(scores - reference[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if pairs.dropout_keys is not None:
            weights = tl.where(_kept(pairs, batch, head, rows, columns), weights, 0.0)
        if terms.values_first is not None:
            offsets = _offsets(pairs, batch, rows, columns)
            left, right = _add_ends(
                left * shrink, right * shrink, weights, terms.values_first, terms.values_length, offsets, AREA
            )
        v = _load(value, batch, head, first, pairs.n_k, BLOCK_N, VALUE_DIM, DV)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return out, peak, total, left, right


@triton.jit
def forward(
    query,
    key,
    value,
    out,
    norm,
    query_factors,
    key_factors,
    values_table,
    at_offset,
    dense,
    terms,
    pairs,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One block of queries of one head: its output and its norm.

    ``at_offset`` (zeros) receives how much of a row's attention lies at each offset of ``values_table``.
    """
    blocks = tl.cdiv(pairs.n_q, BLOCK_M)
    program = tl.program_id(0)
    batch, head = program // blocks // pairs.heads, program // blocks % pairs.heads
    # The last rows first: with causal attention they have the most to do.
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    rows = row[:, None]
    q = _load(query, batch, head, first_row, pairs.n_q, BLOCK_M, HEAD_DIM, D)
    factors = _load(query_factors, batch, head, first_row, pairs.n_q, BLOCK_M, RANK, R)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    left = tl.zeros([BLOCK_M], tl.float32)
    right = tl.zeros([BLOCK_M], tl.float32)
    left_end, inside_end, right_end, end, band_end = _key_areas(
        terms, pairs, batch, first_row, CAUSAL, BLOCK_M, BLOCK_N
    )
    if terms.first is not None and pairs.query_positions is None:
        acc, peak, total, left, right = _attend_blocks(
            *(acc, peak, total, left, right, q, factors, key, value, key_factors, terms, dense, pairs, scale),
            *(batch, head, first_row, rows, left_end * 0, left_end),
            *(CAUSAL, LEFT, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    if pairs.query_positions is None:
        acc, peak, total, left, right = _attend_blocks(
            *(acc, peak, total, left, right, q, factors, key, value, key_factors, terms, dense, pairs, scale),
            *(batch, head, first_row, rows, left_end, inside_end),
            *(CAUSAL, INSIDE, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    if terms.first is not None and pairs.query_positions is None:
        acc, peak, total, left, right = _attend_blocks(
            *(acc, peak, total, left, right, q, factors, key, value, key_factors, terms, dense, pairs, scale),
            *(batch, head, first_row, rows, inside_end, right_end),
            *(CAUSAL, RIGHT, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    acc, peak, total, left, right = _attend_blocks(
        *(acc, peak, total, left, right, q, factors, key, value, key_factors, terms, dense, pairs, scale),
        *(batch, head, first_row, rows, right_end, end),
        *(CAUSAL, ANY, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
    )
    empty = total == 0.0
    shift = tl.where(empty, float("inf"), peak)
    log_sum = tl.log2(tl.where(empty, 1.0, total))
    at_row = _row_index(pairs, batch, head, row)
    if norm.log_sum is None:
        tl.store(norm.shift + at_row, shift + log_sum, mask=row < pairs.n_q)
    else:
        tl.store(norm.shift + at_row, shift, mask=row < pairs.n_q)
        tl.store(norm.log_sum + at_row, log_sum, mask=row < pairs.n_q)
    normaliser = 1.0 / tl.where(empty, 1.0, total)
    if pairs.dropout_keys is not None:
        normaliser *= pairs.dropout_scale
    acc *= normaliser[:, None]
    if at_offset is not None:
        length = terms.values_length
        for block in range(left_end, band_end):
            first = block * BLOCK_N
            columns = (first + tl.arange(0, BLOCK_N))[None, :]
            k = _load(key, batch, head, first, pairs.n_k, BLOCK_N, HEAD_DIM, D)
            fk = _load(key_factors, batch, head, first, pairs.n_k, BLOCK_N, RANK, R)
            scores = _scores(
                *(q, k, factors, fk, terms, dense, pairs, scale, batch, head, first_row, first, rows, columns),
                *(CAUSAL, ANY, BLOCK_M, BLOCK_N),
            )
            weights = tl.exp2((scores - shift[:, None]) - log_sum[:, None])
            if pairs.dropout_keys is not None:
                weights = tl.where(_kept(pairs, batch, head, rows, columns), weights * pairs.dropout_scale, 0.0)
            offsets = _offsets(pairs, batch, rows, columns)
            _add_at_offsets(at_offset, weights, terms.values_first, length, pairs, batch, head, rows, columns, offsets)
        _store_ends(at_offset, left * normaliser, right * normaliser, length, pairs, batch, head, row)
        # What one thread has stored, another reads.
        tl.debug_barrier()
        for first in range(0, length, BLOCK_T):
            column = first + tl.arange(0, BLOCK_T)[None, :]
            at = at_offset + _row_index(pairs, batch, head, rows) * length + column
            weights = tl.load(at, mask=(rows < pairs.n_q) & (column < length), other=0.0)
            vectors = _load(values_table, batch, head, first, length, BLOCK_T, VALUE_DIM, DV)
            acc = tl.dot(weights, vectors, acc, input_precision="ieee")
    _store(out, acc, batch, head, first_row, pairs.n_q, BLOCK_M, VALUE_DIM, DV)


# --- backward


@triton.jit
def row_products(
    out,
    d_out,
    delta,
    pairs,
    BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
):
    """``delta_i = <out_i, d_out_i>``, which is what softmax's gradient subtracts in each row."""
    blocks = tl.cdiv(pairs.n_q, BLOCK_M)
    program = tl.program_id(0)
    batch, head = program // blocks // pairs.heads, program // blocks % pairs.heads
    first_row = program % blocks * BLOCK_M
    o = _load(out, batch, head, first_row, pairs.n_q, BLOCK_M, VALUE_DIM, DV).to(tl.float32)
    do = _load(d_out, batch, head, first_row, pairs.n_q, BLOCK_M, VALUE_DIM, DV).to(tl.float32)
    row = first_row + tl.arange(0, BLOCK_M)
    tl.store(delta + _row_index(pairs, batch, head, row), tl.sum(o * do, 1), mask=row < pairs.n_q)


@triton.jit
def _gradients(
    left,
    right,
    left_out,
    right_out,
    left_factors,
    right_factors,
    row_norm,
    delta,
    terms,
    dense,
    pairs,
    scale,
    batch,
    head,
    first_row,
    first_key,
    rows,
    columns,
    CAUSAL: tl.constexpr,
    AREA: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The weights of a tile after dropout, and the gradient of its scores."""
    scores = _scores(
        *(
            left,
            right,
            left_factors,
            right_factors,
            terms,
            dense,
            pairs,
            scale,
            batch,
            head,
            first_row,
            first_key,
            rows,
            columns,
        ),
        *(CAUSAL, AREA, HEIGHT, WIDTH),
    )
    # In this order: what is left of large numbers is exact, and what is added to it is not lost.
    shift, log_sum = row_norm
    weights = tl.exp2((scores - shift) - log_sum)
    d_weights = tl.dot(left_out, tl.trans(right_out), input_precision="ieee")
    if first_key >= 0:  # see _scores
        if terms.value_products is not None:
            offsets = _offsets(pairs, batch, rows, columns)
            d_weights += _from_row_table(
                *(terms.value_products, terms.values_first, terms.values_length),
                *(pairs, batch, head, rows, offsets, AREA),
            )
    if pairs.dropout_keys is not None:
        kept = _kept(pairs, batch, head, rows, columns)
        d_weights = tl.where(kept, d_weights * pairs.dropout_scale, 0.0)
        return tl.where(kept, weights * pairs.dropout_scale, 0.0), weights * (d_weights - delta)
    else:
        return weights, weights * (d_weights - delta)


@triton.jit
def _query_blocks(
    d_q,
    d_factors,
    bias_left,
    bias_right,
    keys_left,
    keys_right,
    values_left,
    values_right,
    q,
    do,
    factors,
    row_norm,
    row_delta,
    key,
    value,
    key_factors,
    d_bias_rows,
    d_keys_rows,
    at_offset,
    terms,
    dense,
    pairs,
    scale,
    batch,
    head,
    first_row,
    rows,
    start,
    end,
    BIAS_ENDS: tl.constexpr,
    CAUSAL: tl.constexpr,
    AREA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """What the key blocks from ``start`` to ``end`` add to the gradients that belong to a block of queries."""
    for block in range(start, end):
        first = block * BLOCK_N
        columns = (first + tl.arange(0, BLOCK_N))[None, :]
        k = _load(key, batch, head, first, pairs.n_k, BLOCK_N, HEAD_DIM, D)
        fk = _load(key_factors, batch, head, first, pairs.n_k, BLOCK_N, RANK, R)
        v = _load(value, batch, head, first, pairs.n_k, BLOCK_N, VALUE_DIM, DV)
        weights, d_scores = _gradients(
            *(q, k, do, v, factors, fk, row_norm, row_delta, terms, dense, pairs, scale),
            *(batch, head, first_row, first, rows, columns),
            *(CAUSAL, AREA, BLOCK_M, BLOCK_N),
        )
        if q.type.is_block():
            d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision="ieee")
        if factors.type.is_block():
            d_factors = tl.dot(d_scores.to(fk.dtype), fk, d_factors, input_precision="ieee")
        offsets = _offsets(pairs, batch, rows, columns)
        if BIAS_ENDS:
            if AREA == INSIDE:
                # Most tiles inside a long table touch neither end.
                low = pairs.start + first * pairs.key_stride - (first_row + BLOCK_M - 1) * pairs.query_stride
                high = low + (BLOCK_N - 1) * pairs.key_stride + (BLOCK_M - 1) * pairs.query_stride
                if (low <= terms.bias_first) | (high >= terms.bias_first + terms.bias_length - 1):
                    bias_left, bias_right = _add_ends(
                        bias_left, bias_right, d_scores, terms.bias_first, terms.bias_length, offsets, AREA
                    )
            else:
                bias_left, bias_right = _add_ends(
                    bias_left, bias_right, d_scores, terms.bias_first, terms.bias_length, offsets, AREA
                )
        if d_keys_rows is not None:
            keys_left, keys_right = _add_ends(
                keys_left, keys_right, d_scores, terms.keys_first, terms.keys_length, offsets, AREA
            )
        if at_offset is not None:
            values_left, values_right = _add_ends(
                values_left, values_right, weights, terms.values_first, terms.values_length, offsets, AREA
            )
        if AREA != LEFT and AREA != RIGHT:
            if d_bias_rows is not None:
                _add_at_offsets(
                    *(d_bias_rows, d_scores, terms.bias_first, terms.bias_length),
                    *(pairs, batch, head, rows, columns, offsets),
                )
            if d_keys_rows is not None:
                _add_at_offsets(
                    *(d_keys_rows, d_scores, terms.keys_first, terms.keys_length),
                    *(pairs, batch, head, rows, columns, offsets),
                )
            if at_offset is not None:
                _add_at_offsets(
                    *(at_offset, weights, terms.values_first, terms.values_length),
                    *(pairs, batch, head, rows, columns, offsets),
                )
    return d_q, d_factors, bias_left, bias_right, keys_left, keys_right, values_left, values_right


@triton.jit
def query_gradients(
    query,
    key,
    value,
    d_out,
    norm,
    delta,
    query_factors,
    key_factors,
    d_query,
    d_query_factors,
    d_bias_ends,
    d_bias_rows,
    d_keys_rows,
    at_offset,
    dense,
    terms,
    pairs,
    scale,
    d_scale,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """One block of queries of one head: all gradients that are sums over keys.

    ``d_bias_ends`` (2, batch, heads, n_q) receives what lies beyond the ends of the bias, ``d_bias_rows`` (explicit
    positions), ``d_keys_rows`` and ``at_offset`` (batch, heads, n_q, T; zeros) one sum for each row and offset.
    """
    blocks = tl.cdiv(pairs.n_q, BLOCK_M)
    program = tl.program_id(0)
    batch, head = program // blocks // pairs.heads, program // blocks % pairs.heads
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    rows = row[:, None]
    q = _load(query, batch, head, first_row, pairs.n_q, BLOCK_M, HEAD_DIM, D)
    do = _load(d_out, batch, head, first_row, pairs.n_q, BLOCK_M, VALUE_DIM, DV)
    factors = _load(query_factors, batch, head, first_row, pairs.n_q, BLOCK_M, RANK, R)
    row_norm = _load_norm(norm, pairs, batch, head, rows)
    row_delta = _load_rows(delta, pairs, batch, head, rows, 0.0)
    d_q = tl.zeros([BLOCK_M, D], tl.float32)
    d_f = tl.zeros([BLOCK_M, R], tl.float32)
    b0 = tl.zeros([BLOCK_M], tl.float32)
    b1 = tl.zeros([BLOCK_M], tl.float32)
    k0 = tl.zeros([BLOCK_M], tl.float32)
    k1 = tl.zeros([BLOCK_M], tl.float32)
    v0 = tl.zeros([BLOCK_M], tl.float32)
    v1 = tl.zeros([BLOCK_M], tl.float32)
    left_end, inside_end, right_end, end, _ = _key_areas(terms, pairs, batch, first_row, CAUSAL, BLOCK_M, BLOCK_N)
    BIAS_ENDS: tl.constexpr = d_bias_ends is not None
    if terms.first is not None and pairs.query_positions is None:
        d_q, d_f, b0, b1, k0, k1, v0, v1 = _query_blocks(
            *(d_q, d_f, b0, b1, k0, k1, v0, v1, q, do, factors, row_norm, row_delta, key, value, key_factors),
            *(d_bias_rows, d_keys_rows, at_offset, terms, dense, pairs, scale),
            *(batch, head, first_row, rows, left_end * 0, left_end),
            *(BIAS_ENDS, CAUSAL, LEFT, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    if pairs.query_positions is None:
        d_q, d_f, b0, b1, k0, k1, v0, v1 = _query_blocks(
            *(d_q, d_f, b0, b1, k0, k1, v0, v1, q, do, factors, row_norm, row_delta, key, value, key_factors),
            *(d_bias_rows, d_keys_rows, at_offset, terms, dense, pairs, scale),
            *(batch, head, first_row, rows, left_end, inside_end),
            *(BIAS_ENDS, CAUSAL, INSIDE, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    if terms.first is not None and pairs.query_positions is None:
        d_q, d_f, b0, b1, k0, k1, v0, v1 = _query_blocks(
            *(d_q, d_f, b0, b1, k0, k1, v0, v1, q, do, factors, row_norm, row_delta, key, value, key_factors),
            *(d_bias_rows, d_keys_rows, at_offset, terms, dense, pairs, scale),
            *(batch, head, first_row, rows, inside_end, right_end),
            *(BIAS_ENDS, CAUSAL, RIGHT, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    d_q, d_f, b0, b1, k0, k1, v0, v1 = _query_blocks(
        *(d_q, d_f, b0, b1, k0, k1, v0, v1, q, do, factors, row_norm, row_delta, key, value, key_factors),
        *(d_bias_rows, d_keys_rows, at_offset, terms, dense, pairs, scale),
        *(batch, head, first_row, rows, right_end, end),
        *(BIAS_ENDS, CAUSAL, ANY, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
    )
    if query.data is not None:
        _store(d_query, d_q * d_scale, batch, head, first_row, pairs.n_q, BLOCK_M, HEAD_DIM, D)
    if query_factors.data is not None:
        _store(d_query_factors, d_f, batch, head, first_row, pairs.n_q, BLOCK_M, RANK, R)
    if d_bias_ends is not None:
        at = d_bias_ends + _row_index(pairs, batch, head, row)
        rows_in_all = tl.num_programs(0) // blocks * tl.cast(pairs.n_q, tl.int64)
        tl.store(at, b0, mask=row < pairs.n_q)
        tl.store(at + rows_in_all, b1, mask=row < pairs.n_q)
    if d_keys_rows is not None:
        _store_ends(d_keys_rows, k0, k1, terms.keys_length, pairs, batch, head, row)
    if at_offset is not None:
        _store_ends(at_offset, v0, v1, terms.values_length, pairs, batch, head, row)


@triton.jit
def _key_blocks(
    d_k,
    d_v,
    d_factors,
    k,
    v,
    factors,
    query,
    d_out,
    query_factors,
    norm,
    delta,
    terms,
    dense,
    pairs,
    scale,
    batch,
    head,
    first_key,
    columns,
    start,
    end,
    CAUSAL: tl.constexpr,
    AREA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """What the query blocks from ``start`` to ``end`` add to the gradients of a block of keys; tiles transposed."""
    for block in range(start, end):
        first = block * BLOCK_M
        rows = (first + tl.arange(0, BLOCK_M))[None, :]
        q = _load(query, batch, head, first, pairs.n_q, BLOCK_M, HEAD_DIM, D)
        do = _load(d_out, batch, head, first, pairs.n_q, BLOCK_M, VALUE_DIM, DV)
        fq = _load(query_factors, batch, head, first, pairs.n_q, BLOCK_M, RANK, R)
        row_norm = _load_norm(norm, pairs, batch, head, rows)
        row_delta = _load_rows(delta, pairs, batch, head, rows, 0.0)
        weights, d_scores = _gradients(
            *(k, q, v, do, factors, fq, row_norm, row_delta, terms, dense, pairs, scale),
            *(batch, head, first, first_key, rows, columns),
            *(CAUSAL, AREA, BLOCK_N, BLOCK_M),
        )
        d_v = tl.dot(weights.to(do.dtype), do, d_v, input_precision="ieee")
        if k.type.is_block():
            d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision="ieee")
        if factors.type.is_block():
            d_factors = tl.dot(d_scores.to(fq.dtype), fq, d_factors, input_precision="ieee")
    return d_k, d_v, d_factors


@triton.jit
def key_gradients(
    query,
    key,
    value,
    d_out,
    norm,
    delta,
    query_factors,
    key_factors,
    d_key,
    d_value,
    d_key_factors,
    dense,
    terms,
    pairs,
    scale,
    d_scale,
    ADD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """One block of keys of one head: all gradients that are sums over queries; ADD them to what is there."""
    blocks = tl.cdiv(pairs.n_k, BLOCK_N)
    program = tl.program_id(0)
    batch, head = program // blocks // pairs.heads, program // blocks % pairs.heads
    first_key = program % blocks * BLOCK_N
    columns = (first_key + tl.arange(0, BLOCK_N))[:, None]
    k = _load(key, batch, head, first_key, pairs.n_k, BLOCK_N, HEAD_DIM, D)
    v = _load(value, batch, head, first_key, pairs.n_k, BLOCK_N, VALUE_DIM, DV)
    factors = _load(key_factors, batch, head, first_key, pairs.n_k, BLOCK_N, RANK, R)
    d_k = tl.zeros([BLOCK_N, D], tl.float32)
    d_v = tl.zeros([BLOCK_N, DV], tl.float32)
    d_f = tl.zeros([BLOCK_N, R], tl.float32)
    if ADD:
        d_v += _load(d_value, batch, head, first_key, pairs.n_k, BLOCK_N, VALUE_DIM, DV)
    end = tl.cdiv(pairs.n_q, BLOCK_M)
    if pairs.key_end is not None:
        end = tl.where(first_key < tl.load(pairs.key_end + batch), end, 0)
    if pairs.query_positions is None:
        # As in _key_areas, with the parts of rows and columns exchanged: ANY, RIGHT, INSIDE, LEFT.
        low = pairs.start + first_key * pairs.key_stride
        high = low + (BLOCK_N - 1) * pairs.key_stride
        start = end * 0
        any_end = end * 0
        if CAUSAL:
            start = tl.minimum(_blocks_up_to(low - 1, pairs.query_stride, BLOCK_M), end)
            any_end = tl.minimum(tl.maximum(_first_block_from(high, pairs.query_stride, BLOCK_M), start), end)
        d_k, d_v, d_f = _key_blocks(
            *(d_k, d_v, d_f, k, v, factors, query, d_out, query_factors, norm, delta, terms, dense, pairs),
            *(scale, batch, head, first_key, columns, start, any_end),
            *(CAUSAL, ANY, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
        right_end = any_end
        inside_end = end
        if terms.first is not None:
            right_end = tl.minimum(
                tl.maximum(_blocks_up_to(low - terms.last, pairs.query_stride, BLOCK_M), any_end), end
            )
            inside_end = tl.minimum(
                tl.maximum(_first_block_from(high - terms.first, pairs.query_stride, BLOCK_M), right_end), end
            )
            d_k, d_v, d_f = _key_blocks(
                *(d_k, d_v, d_f, k, v, factors, query, d_out, query_factors, norm, delta, terms, dense, pairs),
                *(scale, batch, head, first_key, columns, any_end, right_end),
                *(CAUSAL, RIGHT, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
            )
        d_k, d_v, d_f = _key_blocks(
            *(d_k, d_v, d_f, k, v, factors, query, d_out, query_factors, norm, delta, terms, dense, pairs),
            *(scale, batch, head, first_key, columns, right_end, inside_end),
            *(CAUSAL, INSIDE, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
        if terms.first is not None:
            d_k, d_v, d_f = _key_blocks(
                *(d_k, d_v, d_f, k, v, factors, query, d_out, query_factors, norm, delta, terms, dense, pairs),
                *(scale, batch, head, first_key, columns, inside_end, end),
                *(CAUSAL, LEFT, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
            )
    else:
        d_k, d_v, d_f = _key_blocks(
            *(d_k, d_v, d_f, k, v, factors, query, d_out, query_factors, norm, delta, terms, dense, pairs),
            *(scale, batch, head, first_key, columns, end * 0, end),
            *(CAUSAL, ANY, BLOCK_M, BLOCK_N, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    if key.data is not None:
        d_k *= d_scale
        if ADD:
            d_k += _load(d_key, batch, head, first_key, pairs.n_k, BLOCK_N, HEAD_DIM, D)
        _store(d_key, d_k, batch, head, first_key, pairs.n_k, BLOCK_N, HEAD_DIM, D)
    _store(d_value, d_v, batch, head, first_key, pairs.n_k, BLOCK_N, VALUE_DIM, DV)
    if key_factors.data is not None:
        if ADD:
            d_f += _load(d_key_factors, batch, head, first_key, pairs.n_k, BLOCK_N, RANK, R)
        _store(d_key_factors, d_f, batch, head, first_key, pairs.n_k, BLOCK_N, RANK, R)


@triton.jit
def _fresh_gradients(
    query,
    key,
    value,
    d_out,
    norm,
    delta,
    query_factors,
    key_factors,
    terms,
    dense,
    pairs,
    scale,
    batch,
    head,
    first_row,
    first_key,
    CAUSAL: tl.constexpr,
    AREA: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """The gradient of the scores of any tile."""
    rows = (first_row + tl.arange(0, BLOCK))[:, None]
    columns = (first_key + tl.arange(0, BLOCK))[None, :]
    q = _load(query, batch, head, first_row, pairs.n_q, BLOCK, HEAD_DIM, D)
    do = _load(d_out, batch, head, first_row, pairs.n_q, BLOCK, VALUE_DIM, DV)
    fq = _load(query_factors, batch, head, first_row, pairs.n_q, BLOCK, RANK, R)
    k = _load(key, batch, head, first_key, pairs.n_k, BLOCK, HEAD_DIM, D)
    v = _load(value, batch, head, first_key, pairs.n_k, BLOCK, VALUE_DIM, DV)
    fk = _load(key_factors, batch, head, first_key, pairs.n_k, BLOCK, RANK, R)
    row_norm = _load_norm(norm, pairs, batch, head, rows)
    row_delta = _load_rows(delta, pairs, batch, head, rows, 0.0)
    _, d_scores = _gradients(
        *(
            q,
            k,
            do,
            v,
            fq,
            fk,
            row_norm,
            row_delta,
            terms,
            dense,
            pairs,
            scale,
            batch,
            head,
            first_row,
            first_key,
            rows,
            columns,
        ),
        *(CAUSAL, AREA, BLOCK, BLOCK),
    )
    return d_scores


@triton.jit(do_not_specialize=["batches", "first_diagonal", "diagonals", "splits"])
def diagonal_gradients(
    query,
    key,
    value,
    d_out,
    norm,
    delta,
    query_factors,
    key_factors,
    sums,
    dense,
    terms,
    pairs,
    batches,
    first_diagonal,
    diagonals,
    splits,
    scale,
    CAUSAL: tl.constexpr,
    ROW_STEP: tl.constexpr,
    KEY_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """The gradients of the scores of all tiles with the same offsets, summed over the batch into one tile.

    With affine positions the offsets of a BLOCK x BLOCK tile follow from ``key_stride * key block - query_stride *
    query block``. Where that is the same (a *diagonal* of tiles: every KEY_STEP-th key block with every ROW_STEP-th
    query block) one tile in registers sums them all. ``sums`` is (heads, diagonals, splits, BLOCK, BLOCK).
    """
    program = tl.program_id(0)
    split = program % splits
    diagonal = program // splits % diagonals
    head = program // splits // diagonals
    row_blocks = tl.cdiv(pairs.n_q, BLOCK)
    key_blocks = tl.cdiv(pairs.n_k, BLOCK)
    # KEY_STEP and ROW_STEP are the strides without their common divisor, so diagonals are whole numbers.
    wanted = first_diagonal + diagonal
    row_block = (tl.maximum(-wanted, 0) + KEY_STEP - 1) // KEY_STEP
    row_end = tl.minimum(row_blocks, (tl.maximum(ROW_STEP * (key_blocks - 1) - wanted, -1) + KEY_STEP) // KEY_STEP)
    if ROW_STEP > 1:
        # The first query block that meets a key block on this diagonal at all.
        while (wanted + KEY_STEP * row_block) % ROW_STEP != 0:
            row_block += 1
    count = tl.maximum(row_end - row_block + ROW_STEP - 1, 0) // ROW_STEP
    share = tl.cdiv(count * batches, splits)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(split * share, tl.minimum((split + 1) * share, count * batches)):
        at_row = row_block + step % count * ROW_STEP
        at_key = (wanted + KEY_STEP * at_row) // ROW_STEP
        acc += _fresh_gradients(
            *(query, key, value, d_out, norm, delta, query_factors, key_factors, terms, dense, pairs, scale),
            *(step // count, head, at_row * BLOCK, at_key * BLOCK),
            *(CAUSAL, EDGE, BLOCK, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(sums + tl.cast(program, tl.int64) * BLOCK * BLOCK + row * BLOCK + column, acc)


@triton.jit(do_not_specialize=["first", "length", "base", "step", "diagonals", "splits"])
def sum_diagonals(
    sums,
    d_table,
    first,
    length,
    base,
    step,
    diagonals,
    splits,
    query_stride,
    key_stride,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A table's gradient from the tiles of :func:`diagonal_gradients`; the first and the last column are not touched.

    ``base`` is the offset of the first key and first query of the first diagonal's tile, ``step`` how far the next
    diagonal's is to the right.
    """
    blocks = tl.cdiv(length, BLOCK_T)
    head = tl.program_id(0) // blocks
    first_column = tl.program_id(0) % blocks * BLOCK_T
    columns = first_column + tl.arange(0, BLOCK_T)
    low = first + first_column - base - (BLOCK - 1) * key_stride
    high = first + first_column + BLOCK_T - 1 - base + (BLOCK - 1) * query_stride
    row = tl.arange(0, BLOCK)[:, None]
    acc = tl.zeros([BLOCK_T], tl.float32)
    for diagonal in range(tl.maximum(low, 0) // step, tl.minimum(tl.maximum(high, 0) // step + 1, diagonals)):
        distance = (first + columns - base - diagonal * step)[None, :] + row * query_stride
        key = distance // key_stride
        there = (distance >= 0) & (distance % key_stride == 0) & (key < BLOCK)
        at = sums + (tl.cast(head, tl.int64) * diagonals + diagonal) * splits * BLOCK * BLOCK + row * BLOCK + key
        for split in range(splits):
            acc += tl.sum(tl.load(at + split * BLOCK * BLOCK, mask=there, other=0.0), 0)
    tl.store(d_table + head * length + columns, acc, mask=(columns > 0) & (columns < length - 1))


@triton.jit(do_not_specialize=["batches"])
def dense_gradients(
    query,
    key,
    value,
    d_out,
    norm,
    delta,
    query_factors,
    key_factors,
    d_dense,
    dense,
    terms,
    pairs,
    batches,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
):
    """The gradient of one tile of dense scores, summed over ``batches`` rows of the batch that share it."""
    key_blocks = tl.cdiv(pairs.n_k, BLOCK)
    row_blocks = tl.cdiv(pairs.n_q, BLOCK)
    program = tl.program_id(0)
    first_key = program % key_blocks * BLOCK
    first_row = program // key_blocks % row_blocks * BLOCK
    head = program // key_blocks // row_blocks % pairs.heads
    batch = program // key_blocks // row_blocks // pairs.heads
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for shared in range(batches):
        acc += _fresh_gradients(
            *(query, key, value, d_out, norm, delta, query_factors, key_factors, terms, dense, pairs, scale),
            *(batch * batches + shared, head, first_row, first_key),
            *(CAUSAL, ANY, BLOCK, HEAD_DIM, D, VALUE_DIM, DV, RANK, R),
        )
    row = first_row + tl.arange(0, BLOCK)[:, None]
    column = first_key + tl.arange(0, BLOCK)[None, :]
    at = d_dense.data + tl.cast(batch, tl.int64) * d_dense.batch + tl.cast(head, tl.int64) * d_dense.head
    at = at + row.to(tl.int64) * d_dense.row + column * d_dense.column
    tl.store(at, acc.to(d_dense.data.dtype.element_ty), mask=(row < pairs.n_q) & (column < pairs.n_k))
