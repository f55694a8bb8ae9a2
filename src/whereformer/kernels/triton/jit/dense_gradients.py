"""The kernel of the gradient of dense scores."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import ANY
from .gradients import gradients_of, load_rows
from .tiles import BatchHead, ScoreTile, load, load_side


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
    row = first_row + tl.arange(0, BLOCK)[:, None]
    column = first_key + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for shared in range(batches):
        place = BatchHead(batch * batches + shared, head)
        queries = load_side(inputs.query, inputs.query_factors, place, first_row, pairs.n_q, BLOCK)
        keys = load_side(inputs.key, inputs.key_factors, place, first_key, pairs.n_k, BLOCK)
        do = load(known.d_out, place, first_row, pairs.n_q, BLOCK)
        v = load(inputs.value, place, first_key, pairs.n_k, BLOCK)
        row_state = load_rows(known, pairs, place, row)
        tile = ScoreTile(place, first_row, first_key, row, column)
        _, d_scores, _ = gradients_of(queries, keys, do, v, row_state, tile, terms, pairs, ANY)
        acc += d_scores
    at = d_dense.data + tl.cast(batch, tl.int64) * d_dense.batch + tl.cast(head, tl.int64) * d_dense.head
    at = at + row.to(tl.int64) * d_dense.row + column * d_dense.column
    tl.store(at, acc.to(d_dense.data.dtype.element_ty), mask=(row < pairs.n_q) & (column < pairs.n_k))
