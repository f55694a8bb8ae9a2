"""The kernels of gradients that are computed tile by tile: of a bias between its ends, and of dense scores."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import ANY, EDGE
from .gradients import fresh_gradients
from .tiles import BatchHead


@triton.jit(do_not_specialize=["batches", "first_diagonal", "diagonals", "splits"])
def diagonal_gradients(
    inputs,
    known,
    sums,
    terms,
    pairs,
    batches,
    first_diagonal,
    diagonals,
    splits,
    ROW_STEP: tl.constexpr,
    KEY_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the gradients of the scores of all tiles with the same offsets, over the batch, into one tile.

    With affine positions the offsets of a BLOCK x BLOCK tile follow from ``key_stride * key block - query_stride *
    query block``. All tiles with the same offsets (a *diagonal* of tiles: every KEY_STEP-th key block with every
    ROW_STEP-th query block) are summed in one tile in registers. ``sums`` is (heads, diagonals, splits, BLOCK, BLOCK).
    """
    program = tl.program_id(0)
    split = program % splits
    diagonal = program // splits % diagonals
    head = program // splits // diagonals
    row_blocks = tl.cdiv(pairs.n_q, BLOCK)
    key_blocks = tl.cdiv(pairs.n_k, BLOCK)
    # KEY_STEP and ROW_STEP are the strides divided by their common divisor, so diagonals are whole numbers.
    wanted = first_diagonal + diagonal
    row_block = (tl.maximum(-wanted, 0) + KEY_STEP - 1) // KEY_STEP
    row_end = tl.minimum(row_blocks, (tl.maximum(ROW_STEP * (key_blocks - 1) - wanted, -1) + KEY_STEP) // KEY_STEP)
    if ROW_STEP > 1:
        # Find the first query block that has a key block on this diagonal.
        while (wanted + KEY_STEP * row_block) % ROW_STEP != 0:
            row_block += 1
    count = tl.maximum(row_end - row_block + ROW_STEP - 1, 0) // ROW_STEP
    share = tl.cdiv(count * batches, splits)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(split * share, tl.minimum((split + 1) * share, count * batches)):
        at_row = row_block + step % count * ROW_STEP
        at_key = (wanted + KEY_STEP * at_row) // ROW_STEP
        place = BatchHead(step // count, head)
        acc += fresh_gradients(inputs, known, place, at_row * BLOCK, at_key * BLOCK, terms, pairs, EDGE, BLOCK)
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(sums + tl.cast(program, tl.int64) * BLOCK * BLOCK + row * BLOCK + column, acc)


@triton.jit(do_not_specialize=["first", "length", "base", "step", "diagonals", "splits", "begin", "end"])
def sum_diagonals(
    sums,
    d_table,
    first,
    length,
    base,
    step,
    diagonals,
    splits,
    begin,
    end,
    query_stride,
    key_stride,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Sum the tiles of :func:`diagonal_gradients` into the columns from ``begin`` to ``end`` of a table's gradient.

    ``base`` is the offset between the first query and the first key of the first diagonal's tile; ``step`` is its
    increase from one diagonal to the next.
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
    tl.store(d_table + head * length + columns, acc, mask=(columns >= begin) & (columns < end))


@triton.jit(do_not_specialize=["batches"])
def dense_gradients(inputs, known, d_dense, terms, pairs, batches, BLOCK: tl.constexpr):
    """Compute the gradient of one tile of dense scores, summed over the ``batches`` rows of the batch that share it."""
    key_blocks = tl.cdiv(pairs.n_k, BLOCK)
    row_blocks = tl.cdiv(pairs.n_q, BLOCK)
    program = tl.program_id(0)
    first_key = program % key_blocks * BLOCK
    first_row = program // key_blocks % row_blocks * BLOCK
    head = program // key_blocks // row_blocks % pairs.heads
    batch = program // key_blocks // row_blocks // pairs.heads
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for shared in range(batches):
        place = BatchHead(batch * batches + shared, head)
        acc += fresh_gradients(inputs, known, place, first_row, first_key, terms, pairs, ANY, BLOCK)
    row = first_row + tl.arange(0, BLOCK)[:, None]
    column = first_key + tl.arange(0, BLOCK)[None, :]
    at = d_dense.data + tl.cast(batch, tl.int64) * d_dense.batch + tl.cast(head, tl.int64) * d_dense.head
    at = at + row.to(tl.int64) * d_dense.row + column * d_dense.column
    tl.store(at, acc.to(d_dense.data.dtype.element_ty), mask=(row < pairs.n_q) & (column < pairs.n_k))
