"""The gradient of a bias: sums of the scores' gradient over all pairs with the same offset."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import ANY, INSIDE, in_documents
from .gradients import square_gradients
from .tiles import BatchHead


@triton.jit
def _add_tiles(acc, inputs, norm, terms, pairs, place, first, end, diagonal, AREA: tl.constexpr, BLOCK: tl.constexpr):
    """Add the gradients of scores in the blocks of queries from ``first`` to ``end``."""
    for block in range(first, end):
        row, key_block = block * BLOCK, block + diagonal
        if pairs.first_keys is None:
            acc += square_gradients(inputs, norm, terms, pairs, place, row, key_block * BLOCK, AREA, BLOCK)
        else:
            firsts, lasts, batch = pairs.first_keys, pairs.last_keys, place.batch
            start, stop = in_documents(firsts, lasts, batch, row, pairs.n_q, key_block + 1, BLOCK, BLOCK)
            if (start <= key_block) & (key_block < stop):
                acc += square_gradients(inputs, norm, terms, pairs, place, row, key_block * BLOCK, AREA, BLOCK)
    return acc


@triton.jit(do_not_specialize=["low", "count", "parts", "batches"])
def diagonals(inputs, norm, out, terms, pairs, low, count, parts, batches, BLOCK: tl.constexpr):
    """Sum the gradient of scores along one diagonal of tiles of one head, over a part of the batch.

    All tiles of a diagonal have the same offsets: dB[o] = sum_i dS[i, i + o] is taken of their sum, [BLOCK, BLOCK]. It
    has the diagonals of pairs from ``1 - BLOCK`` to ``BLOCK - 1`` beside its own. ``out`` receives those below 0 and
    those from 0 on, (heads, count, parts, 2, BLOCK). The diagonals of tiles are ``count``, from ``low`` on.
    """
    program = tl.program_id(0)
    part, head = program % parts, program // parts % pairs.heads
    # In causal attention, the last have the most work.
    number = count - 1 - program // parts // pairs.heads
    diagonal = low + number
    first = tl.maximum(-diagonal, 0)
    end = tl.minimum(tl.cdiv(pairs.n_q, BLOCK), tl.cdiv(pairs.n_k, BLOCK) - diagonal)
    # Before, all keys of a tile are there and may be attended.
    whole = pairs.n_k // BLOCK - diagonal
    lowest = pairs.start + (diagonal * BLOCK - (BLOCK - 1)) * pairs.key_stride
    if pairs.min_offset is not None:
        whole = tl.where(lowest < pairs.min_offset, first, whole)
    if pairs.max_offset is not None:
        whole = tl.where(lowest + (2 * BLOCK - 2) * pairs.key_stride > pairs.max_offset, first, whole)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    each = tl.cdiv(batches, parts)
    for batch in range(part * each, tl.minimum(batches, part * each + each)):
        place = BatchHead(batch, head)
        stop = end
        if pairs.key_end is not None:
            stop = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK) - diagonal)
        between = tl.minimum(tl.maximum(whole, first), stop)
        acc = _add_tiles(acc, inputs, norm, terms, pairs, place, first, between, diagonal, INSIDE, BLOCK)
        acc = _add_tiles(acc, inputs, norm, terms, pairs, place, between, stop, diagonal, ANY, BLOCK)
    # Turn each row to the left by its number: diagonals become columns. Keys that went around the end are those below.
    pair = tl.arange(0, BLOCK * BLOCK)
    row, column = pair // BLOCK, pair % BLOCK
    turned = tl.gather(tl.reshape(acc, [BLOCK * BLOCK]), row * BLOCK + ((row + column) & (BLOCK - 1)), 0)
    turned = tl.reshape(turned, [BLOCK, BLOCK])
    column = tl.arange(0, BLOCK)
    around = tl.arange(0, BLOCK)[:, None] + column[None, :] >= BLOCK
    at = out + ((head * count + number) * parts + part) * 2 * BLOCK + column
    tl.store(at, tl.sum(tl.where(around, turned, 0.0), 0))
    tl.store(at + BLOCK, tl.sum(tl.where(around, 0.0, turned), 0))


@triton.jit(do_not_specialize=["first", "length", "count", "parts", "batches"])
def finish_bias(
    d_bias,
    sums,
    ends,
    first,
    length,
    count,
    parts,
    batches,
    heads,
    n_q,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute COLUMNS columns of one head of the gradient of a bias from the sums of :func:`diagonals`.

    The first column has the diagonal of pairs ``first / STRIDE`` of those in ``sums``. If there are ``ends``, see
    ``TableSums``, they are what the first and the last column get instead.
    """
    blocks = tl.cdiv(length, COLUMNS)
    program = tl.program_id(0)
    head = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    distance = column + first
    pair = distance // STRIDE
    there = (distance >= 0) & (distance % STRIDE == 0) & (pair // BLOCK + 1 < count) & (column < length)
    if ends is not None:
        there = there & (column > 0) & (column < length - 1)
    total = tl.zeros([COLUMNS], tl.float32)
    for part in range(parts):
        at = sums + ((head * count + pair // BLOCK) * parts + part) * 2 * BLOCK + pair % BLOCK
        total += tl.load(at + BLOCK, mask=there, other=0.0)
        total += tl.load(at + parts * 2 * BLOCK, mask=there, other=0.0)
    if ends is not None:
        if program % blocks == 0:
            total += tl.where(column == 0, _sum(ends, batches, heads, head, 0, n_q, COLUMNS), 0.0)
        if program % blocks == blocks - 1:
            total += tl.where(column == length - 1, _sum(ends, batches, heads, head, 1, n_q, COLUMNS), 0.0)
    at = d_bias + tl.cast(head, tl.int64) * length + column
    tl.store(at, total.to(d_bias.dtype.element_ty), mask=column < length)


@triton.jit
def _sum(ends, batches, heads, head, SIDE: tl.constexpr, n_q, COLUMNS: tl.constexpr):
    """Sum the left or the right ends of all rows of a head."""
    total = tl.zeros([COLUMNS], tl.float32)
    for batch in range(batches):
        at = ends + ((tl.cast(batch, tl.int64) * heads + head) * 2 + SIDE) * n_q
        for first in range(0, n_q, COLUMNS):
            row = first + tl.arange(0, COLUMNS)
            total += tl.load(at + row, mask=row < n_q, other=0.0)
    return tl.sum(total, 0)
