"""The forward kernel: the output of attention, and the norms of its rows."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .areas import ANY, INSIDE, LEFT, key_areas
from .offsets import Ends, add_at_offsets, add_ends, add_vectors, no_ends
from .scores import kept, scores_of, weights_of
from .tiles import QueryBlock, ScoreTile, head_index, load, load_side, place_of, store


class Softmax(NamedTuple):
    """A running softmax: its weighted sum of values, its peak and sum, and its weights beyond a table's ends."""

    out: Any
    peak: Any
    total: Any
    ends: Ends


@triton.jit
def _attend_blocks(softmax, queries, inputs, terms, pairs, start, end, AREA: tl.constexpr, BLOCK_N: tl.constexpr):
    """Run the online softmax over the key blocks from ``start`` to ``end``."""
    out, peak, total, ends = softmax
    place = queries.place
    for block in range(start, end):
        first = block * BLOCK_N
        columns = (first + tl.arange(0, BLOCK_N))[None, :]
        tile = ScoreTile(place, queries.first_row, first, queries.rows, columns)
        keys = load_side(inputs.key, inputs.key_factors, place, first, pairs.n_k, BLOCK_N)
        scores, _ = scores_of(queries.side, keys, tile, terms, pairs, AREA)
        largest = tl.max(scores, 1)
        if terms.products.last:
            largest *= terms.products.log2
        new_peak = tl.maximum(peak, largest)
        # Rows without a permitted key so far have no peak; any finite number gives them weights of 0.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - reference)
        weights = weights_of(scores, reference[:, None], 0.0, terms)
        total = total * shrink + tl.sum(weights, 1)
        if pairs.dropout_seeds is not None:
            weights = tl.where(kept(tile, pairs), weights, 0.0)
        if terms.value_table.first is not None:
            ends = Ends(ends.left * shrink, ends.right * shrink)
            ends = add_ends(ends, weights, terms.value_table, tile, pairs, AREA)
        v = load(inputs.value, place, first, pairs.n_k, BLOCK_N)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=terms.products.precision)
        peak = new_peak
    return Softmax(out, peak, total, ends)


@triton.jit
def forward(
    inputs, out, rounded_off, norm, values, at_offset, terms, pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute the output, what rounding took from it, and the norm of one block of queries of one head.

    ``at_offset`` receives the share of a row's attention at each offset between the ends of the table ``values``,
    (batch, heads, T, value_dim), like the rows of ``TableSums``.
    """
    blocks = tl.cdiv(pairs.n_q, BLOCK_M)
    program = tl.program_id(0)
    place = place_of(program, blocks, pairs)
    # Start with the last rows: in causal attention they have the most work.
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    rows = row[:, None]
    side = load_side(inputs.query, inputs.query_factors, place, first_row, pairs.n_q, BLOCK_M)
    queries = QueryBlock(place, first_row, rows, side, None, None)
    softmax = Softmax(
        tl.zeros([BLOCK_M, inputs.value.padded], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        no_ends(BLOCK_M),
    )
    bounds, band = key_areas(terms, pairs, place.batch, first_row, BLOCK_M, BLOCK_N)
    if pairs.query_positions is None and pairs.min_offset is not None:
        softmax = _attend_blocks(softmax, queries, inputs, terms, pairs, bounds[0], bounds[1], ANY, BLOCK_N)
    for area in tl.static_range(LEFT, ANY + 1):
        if area == ANY or (pairs.query_positions is None and (area == INSIDE or terms.span.first is not None)):
            start, end = bounds[area + 2], bounds[area + 3]
            softmax = _attend_blocks(softmax, queries, inputs, terms, pairs, start, end, area, BLOCK_N)
    acc, peak, total, ends = softmax
    empty = total == 0.0
    shift = tl.where(empty, float("inf"), peak)
    log_sum = tl.log2(tl.where(empty, 1.0, total))
    at_row = head_index(pairs, place) * norm.head + row
    if norm.log_sum is None:
        tl.store(norm.shift + at_row, shift + log_sum, mask=row < pairs.n_q)
    else:
        tl.store(norm.shift + at_row, shift, mask=row < pairs.n_q)
        tl.store(norm.log_sum + at_row, log_sum, mask=row < pairs.n_q)
    normalizer = 1.0 / tl.where(empty, 1.0, total)
    if pairs.dropout_seeds is not None:
        normalizer *= pairs.dropout_scale
    acc *= normalizer[:, None]
    if at_offset is not None:
        for block in range(band[0], band[1]):
            first = block * BLOCK_N
            tile = ScoreTile(place, first_row, first, rows, (first + tl.arange(0, BLOCK_N))[None, :])
            keys = load_side(inputs.key, inputs.key_factors, place, first, pairs.n_k, BLOCK_N)
            scores, _ = scores_of(side, keys, tile, terms, pairs, ANY)
            weights = weights_of(scores, shift[:, None], log_sum[:, None], terms)
            if pairs.dropout_seeds is not None:
                weights = tl.where(kept(tile, pairs), weights * pairs.dropout_scale, 0.0)
            add_at_offsets(at_offset, weights, terms.value_table, tile, pairs)
        # Weights and vectors are rounded to the values' dtype, so that tensor cores multiply them.
        ends = Ends(ends.left * normalizer, ends.right * normalizer)
        dtype = inputs.value.data.dtype.element_ty
        acc = add_vectors(
            acc, ends, at_offset, values, terms.value_table, terms, pairs, place, first_row, dtype, BLOCK_M
        )
    store(out, acc, place, first_row, pairs.n_q, BLOCK_M)
    if rounded_off.data is not None:
        rounded = acc.to(out.data.dtype.element_ty).to(tl.float32)
        store(rounded_off, acc - rounded, place, first_row, pairs.n_q, BLOCK_M)
