"""The gradient of a bias: sums of the scores' gradient over all pairs with the same offset."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .. import arguments
from .areas import ANY, INSIDE, limit_to_documents
from .gradients import compute_square_gradients
from .tiles import BatchHead

COLUMNS = tl.constexpr(arguments.BIAS_COLUMNS)


@triton.jit
def _add_tiles(
    acc, inputs, norm, terms, pairs, batch_head, first, end, diagonal, AREA: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the gradients of scores in the blocks of queries from ``first`` to ``end``, (BLOCK, BLOCK)."""
    for block in range(first, end):
        row, key_block = block * BLOCK, block + diagonal
        key = key_block * BLOCK
        if pairs.first_keys is None:
            acc += compute_square_gradients(inputs, norm, terms, pairs, batch_head, row, key, AREA, BLOCK)
        else:
            firsts, lasts, batch = pairs.first_keys, pairs.last_keys, batch_head.batch
            start, stop = limit_to_documents(firsts, lasts, batch, row, pairs.n_q, key_block + 1, BLOCK, BLOCK)
            if (start <= key_block) & (key_block < stop):
                acc += compute_square_gradients(inputs, norm, terms, pairs, batch_head, row, key, AREA, BLOCK)
    return acc


@triton.jit(do_not_specialize=["low", "count", "parts", "batches"])
def diagonals(inputs, norm, out, terms, pairs, low, count, parts, batches, BLOCK: tl.constexpr):
    """Sum the gradient of scores along one diagonal of tiles of one head, over a part of the batch.

    ``d_bias[o] = sum_i d_scores[i, i + o]`` is taken of the sum of the diagonal's tiles, (BLOCK, BLOCK), because all of
    them have the same offsets. This sum has the diagonals of pairs from ``1 - BLOCK`` to ``BLOCK - 1`` around its own.
    ``out`` receives those below 0 and those from 0 on, (heads, count, parts, 2, BLOCK). The diagonals of tiles are
    ``count``, from ``low`` on.
    """
    program = tl.program_id(0)
    part, head = program % parts, program // parts % pairs.heads
    # In causal attention, the last have the most work.
    number = count - 1 - program // parts // pairs.heads
    diagonal = low + number
    first = tl.maximum(-diagonal, 0)
    end = tl.minimum(tl.cdiv(pairs.n_q, BLOCK), tl.cdiv(pairs.n_k, BLOCK) - diagonal)
    # Before this block, a tile has all its keys, and all of them may be attended.
    first_masked = pairs.n_k // BLOCK - diagonal
    lowest = pairs.start + (diagonal * BLOCK - (BLOCK - 1)) * pairs.key_stride
    if pairs.min_offset is not None:
        first_masked = tl.where(lowest < pairs.min_offset, first, first_masked)
    if pairs.max_offset is not None:
        highest = lowest + (2 * BLOCK - 2) * pairs.key_stride
        first_masked = tl.where(highest > pairs.max_offset, first, first_masked)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)  # (BLOCK, BLOCK)
    part_size = tl.cdiv(batches, parts)
    for batch in range(part * part_size, tl.minimum(batches, part * part_size + part_size)):
        batch_head = BatchHead(batch, head)
        stop = end
        if pairs.key_end is not None:
            stop = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK) - diagonal)
        between = tl.minimum(tl.maximum(first_masked, first), stop)
        acc = _add_tiles(acc, inputs, norm, terms, pairs, batch_head, first, between, diagonal, INSIDE, BLOCK)
        acc = _add_tiles(acc, inputs, norm, terms, pairs, batch_head, between, stop, diagonal, ANY, BLOCK)
    # Turn each row to the left by its number: diagonals become columns. Keys that went around the end are those below.
    pair = tl.arange(0, BLOCK * BLOCK)
    row, column = pair // BLOCK, pair % BLOCK
    turned = tl.gather(tl.reshape(acc, [BLOCK * BLOCK]), row * BLOCK + ((row + column) & (BLOCK - 1)), 0)
    turned = tl.reshape(turned, [BLOCK, BLOCK])
    column = tl.arange(0, BLOCK)  # (BLOCK,)
    around = tl.arange(0, BLOCK)[:, None] + column[None, :] >= BLOCK  # (BLOCK, BLOCK)
    pointers = out + ((head * count + number) * parts + part) * 2 * BLOCK + column  # (BLOCK,)
    tl.store(pointers, tl.sum(tl.where(around, turned, 0.0), 0))
    tl.store(pointers + BLOCK, tl.sum(tl.where(around, 0.0, turned), 0))


@triton.jit(do_not_specialize=["first", "length", "count", "parts", "batches"])
def finish_bias(
    d_bias, sums, ends, first, length, count, parts, batches, heads, n_q, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute COLUMNS columns of one head of the gradient of a bias from the sums of :func:`diagonals`.

    ``d_bias[o]`` is the sum, over the parts, of the two diagonals of tiles that have the offset o. The first column has
    the diagonal of pairs ``first / STRIDE`` of those in ``sums``. If there are ``ends``, see ``TableSums``, the first
    and the last column are the sums of these instead.
    """
    blocks = tl.cdiv(length, COLUMNS)
    program = tl.program_id(0)
    head = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    distance = column + first
    pair = distance // STRIDE
    has_sums = (distance >= 0) & (distance % STRIDE == 0) & (pair // BLOCK + 1 < count) & (column < length)
    if ends is not None:
        has_sums = has_sums & (column > 0) & (column < length - 1)
    total = tl.zeros([COLUMNS], tl.float32)  # (COLUMNS,)
    for part in range(parts):
        pointers = sums + ((head * count + pair // BLOCK) * parts + part) * 2 * BLOCK + pair % BLOCK  # (COLUMNS,)
        total += tl.load(pointers + BLOCK, mask=has_sums, other=0.0)
        total += tl.load(pointers + parts * 2 * BLOCK, mask=has_sums, other=0.0)
    if ends is not None:
        if program % blocks == 0:
            total += tl.where(column == 0, _sum_ends(ends, batches, heads, head, 0, n_q), 0.0)
        if program % blocks == blocks - 1:
            total += tl.where(column == length - 1, _sum_ends(ends, batches, heads, head, 1, n_q), 0.0)
    pointers = d_bias + tl.cast(head, tl.int64) * length + column  # (COLUMNS,)
    tl.store(pointers, total.to(d_bias.dtype.element_ty), mask=column < length)


@triton.jit
def _sum_ends(ends, batches, heads, head, SIDE: tl.constexpr, n_q):
    """Sum the left or the right ends of all rows of a head."""
    total = tl.zeros([COLUMNS], tl.float32)  # (COLUMNS,)
    for batch in range(batches):
        pointers = ends + ((tl.cast(batch, tl.int64) * heads + head) * 2 + SIDE) * n_q
        for first in range(0, n_q, COLUMNS):
            row = first + tl.arange(0, COLUMNS)  # (COLUMNS,)
            total += tl.load(pointers + row, mask=row < n_q, other=0.0)  # (COLUMNS,)
    return tl.sum(total, 0)
