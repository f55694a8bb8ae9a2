"""The forward kernel: the output of attention, and the norms of its rows."""

# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from .areas import ANY, INSIDE, LEFT, find_key_areas
from .offsets import Ends, add_at_offsets, add_ends, add_vectors, zero_ends
from .scores import compute_scores, compute_weights, dropout_keep_mask
from .tiles import QueryBlock, ScoreTile, find_batch_head, head_index, load, load_side, store


class Softmax(NamedTuple):
    """A running softmax: its weighted sum of values, its peak and sum, and its weights beyond a table's ends."""

    out: tl.tensor  # (BLOCK_M, value_dim)
    peak: tl.tensor  # (BLOCK_M,)
    total: tl.tensor  # (BLOCK_M,)
    ends: Ends


@triton.jit
def _attend_blocks(softmax, queries, inputs, terms, pairs, start, end, AREA: tl.constexpr, BLOCK_N: tl.constexpr):
    """Run the online softmax over the key blocks from ``start`` to ``end``."""
    out, peak, total, ends = softmax
    batch_head = queries.batch_head
    PRECISION: tl.constexpr = terms.products.precision
    for block in range(start, end):
        first_key = block * BLOCK_N
        columns = (first_key + tl.arange(0, BLOCK_N))[None, :]  # (1, BLOCK_N)
        tile = ScoreTile(batch_head, queries.first_row, first_key, queries.rows, columns)
        keys = load_side(inputs.key, inputs.key_factors, batch_head, first_key, pairs.n_k, BLOCK_N)
        scores, _ = compute_scores(queries.side, keys, tile, terms, pairs, AREA)  # (BLOCK_M, BLOCK_N)
        largest = tl.max(scores, 1)  # (BLOCK_M,)
        if terms.products.is_scaled_last:
            largest *= terms.products.log2_scale
        new_peak = tl.maximum(peak, largest)  # (BLOCK_M,)
        # Rows without a permitted key so far have no peak; any finite number gives them weights of 0.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # (BLOCK_M,)
        shrink = tl.exp2(peak - reference)  # (BLOCK_M,)
        weights = compute_weights(scores, reference[:, None], 0.0, terms)  # (BLOCK_M, BLOCK_N)
        total = total * shrink + tl.sum(weights, 1)  # (BLOCK_M,)
        if pairs.dropout_seeds is not None:
            weights = tl.where(dropout_keep_mask(tile, pairs), weights, 0.0)  # (BLOCK_M, BLOCK_N)
        if terms.value_table.first is not None:
            ends = Ends(ends.left * shrink, ends.right * shrink)
            ends = add_ends(ends, weights, terms.value_table.first, terms.value_table.length, tile, pairs, AREA)
        v = load(inputs.value, batch_head, first_key, pairs.n_k, BLOCK_N)  # (BLOCK_N, value_dim)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)  # (BLOCK_M, value_dim)
        peak = new_peak
    return Softmax(out, peak, total, ends)


@triton.jit
def forward(
    inputs, out, rounding_error, norm, values, at_offset, terms, pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute the output, its rounding error, and the norm of one block of queries of one head.

    With the scores in units of log2, the norm of a row, dropout's scaled keep mask m and the table of vectors Tv
    (``values``, (batch, heads, T, value_dim)) at the offset o::

        norm[i] = log2(sum_j exp2(scores[i, j]))
        weights[i, j] = m[i, j] * exp2(scores[i, j] - norm[i])
        out[i] = sum_j weights[i, j] * (value[j] + Tv[o])

    ``at_offset`` receives the share of a row's attention at each offset between the ends of the table, like the rows of
    ``TableSums``: the second sum is taken from these.
    """
    blocks = tl.cdiv(pairs.n_q, BLOCK_M)
    program = tl.program_id(0)
    batch_head = find_batch_head(program, blocks, pairs)
    # Start with the last rows: in causal attention they have the most work.
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    rows = row[:, None]  # (BLOCK_M, 1)
    side = load_side(inputs.query, inputs.query_factors, batch_head, first_row, pairs.n_q, BLOCK_M)
    queries = QueryBlock(batch_head, first_row, rows, side, None, None)
    softmax = Softmax(
        tl.zeros([BLOCK_M, inputs.value.padded_width], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        zero_ends(BLOCK_M),
    )
    bounds, band = find_key_areas(terms, pairs, batch_head.batch, first_row, BLOCK_M, BLOCK_N)
    if pairs.query_positions is None and pairs.min_offset is not None:
        softmax = _attend_blocks(softmax, queries, inputs, terms, pairs, bounds[0], bounds[1], ANY, BLOCK_N)
    for area in tl.static_range(LEFT, ANY + 1):
        if area == ANY or (pairs.query_positions is None and (area == INSIDE or terms.span.first is not None)):
            start, end = bounds[area + 2], bounds[area + 3]
            softmax = _attend_blocks(softmax, queries, inputs, terms, pairs, start, end, area, BLOCK_N)
    acc, peak, total, ends = softmax
    empty = total == 0.0  # (BLOCK_M,)
    shift = tl.where(empty, float("inf"), peak)  # (BLOCK_M,)
    log_sum = tl.log2(tl.where(empty, 1.0, total))  # (BLOCK_M,)
    row_index = head_index(pairs, batch_head) * norm.head_stride + row  # (BLOCK_M,)
    if norm.log_sum is None:
        tl.store(norm.shift + row_index, shift + log_sum, mask=row < pairs.n_q)
    else:
        tl.store(norm.shift + row_index, shift, mask=row < pairs.n_q)
        tl.store(norm.log_sum + row_index, log_sum, mask=row < pairs.n_q)
    normalizer = 1.0 / tl.where(empty, 1.0, total)  # (BLOCK_M,)
    if pairs.dropout_seeds is not None:
        normalizer *= pairs.dropout_scale
    acc *= normalizer[:, None]  # (BLOCK_M, value_dim)
    if at_offset is not None:
        for block in range(band[0], band[1]):
            first_key = block * BLOCK_N
            tile = ScoreTile(batch_head, first_row, first_key, rows, (first_key + tl.arange(0, BLOCK_N))[None, :])
            keys = load_side(inputs.key, inputs.key_factors, batch_head, first_key, pairs.n_k, BLOCK_N)
            scores, _ = compute_scores(side, keys, tile, terms, pairs, ANY)  # (BLOCK_M, BLOCK_N)
            weights = compute_weights(scores, shift[:, None], log_sum[:, None], terms)  # (BLOCK_M, BLOCK_N)
            if pairs.dropout_seeds is not None:
                weights = tl.where(dropout_keep_mask(tile, pairs), weights * pairs.dropout_scale, 0.0)
            add_at_offsets(at_offset, weights, terms.value_table, tile, pairs)
        # Weights and vectors are rounded to the values' dtype, so that tensor cores multiply them.
        ends = Ends(ends.left * normalizer, ends.right * normalizer)
        dtype = inputs.value.data.dtype.element_ty
        acc = add_vectors(
            acc, ends, at_offset, values, terms.value_table, terms, pairs, batch_head, first_row, dtype, BLOCK_M
        )
    store(out, acc, batch_head, first_row, pairs.n_q, BLOCK_M)
    if rounding_error.data is not None:
        rounded = acc.to(out.data.dtype.element_ty).to(tl.float32)  # (BLOCK_M, value_dim)
        store(rounding_error, acc - rounded, batch_head, first_row, pairs.n_q, BLOCK_M)
