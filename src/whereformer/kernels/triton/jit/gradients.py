"""The gradient of a tile's scores, with which all gradient kernels begin, and the kernel that needs no more."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .areas import ANY
from .scores import from_products, kept, level_differences, products_index, scores_of, weights_of
from .tiles import BatchHead, ScoreTile, load, load_numbers, load_side


class RowState(NamedTuple):
    """What is known about each row of a tile; see ``Norm``."""

    shift: Any
    log_sum: Any
    delta: Any


@triton.jit
def load_rows(norm, pairs, place, rows):
    """Load the state of rows. Rows beyond the last have an infinite shift, and therefore no weights."""
    shift = load_numbers(norm.shift, norm.head, pairs, place, rows, float("inf"))
    delta = load_numbers(norm.delta, norm.head, pairs, place, rows, 0.0)
    if norm.log_sum is None:
        return RowState(shift, 0.0, delta)
    else:
        log_sum = load_numbers(norm.log_sum, norm.head, pairs, place, rows, 0.0)
        return RowState(shift, log_sum, delta)


@triton.jit
def gradients_of(left, right, left_out, right_out, row_state, tile, terms, pairs, AREA: tl.constexpr):
    """Return the weights of a tile after dropout, the gradient of its scores, and the slope of the soft cap.

    ``left`` and ``right`` are the sides of its axes. The weights' gradient is the product of ``left_out`` and
    ``right_out``: the output's gradient if an axis is queries, values if it is keys.
    """
    scores, capped = scores_of(left, right, tile, terms, pairs, AREA)
    weights = weights_of(scores, row_state.shift, row_state.log_sum, terms)
    d_weights = tl.zeros(scores.shape, tl.float32)
    if terms.value_table.products is not None:
        index = products_index(terms.value_table, tile, pairs, AREA)
        if tile.first_key >= 0:  # see scores_of
            products = from_products(terms.value_table, index, tile, pairs, AREA)
            d_weights = tl.broadcast_to(products, d_weights.shape)
    d_weights = tl.dot(left_out, tl.trans(right_out), d_weights, input_precision=terms.products.precision)
    if pairs.dropout_seeds is not None:
        survives = kept(tile, pairs)
        d_weights = tl.where(survives, d_weights * pairs.dropout_scale, 0.0)
    d_scores = weights * (d_weights - row_state.delta)
    if pairs.dropout_seeds is not None:
        weights = tl.where(survives, weights * pairs.dropout_scale, 0.0)
    return weights, d_scores, 1.0 - capped * capped


@triton.jit
def square_gradients(inputs, norm, terms, pairs, place, first_row, first_key, AREA: tl.constexpr, BLOCK: tl.constexpr):
    """Return the gradient of the scores of a tile, [BLOCK, BLOCK], of which nothing is loaded yet."""
    row = (first_row + tl.arange(0, BLOCK))[:, None]
    column = (first_key + tl.arange(0, BLOCK))[None, :]
    queries = load_side(inputs.query, inputs.query_factors, place, first_row, pairs.n_q, BLOCK)
    keys = load_side(inputs.key, inputs.key_factors, place, first_key, pairs.n_k, BLOCK)
    do = load(inputs.d_out, place, first_row, pairs.n_q, BLOCK)
    v = load(inputs.value, place, first_key, pairs.n_k, BLOCK)
    row_state = load_rows(norm, pairs, place, row)
    tile = ScoreTile(place, first_row, first_key, row, column)
    _, d_scores, _ = gradients_of(queries, keys, do, v, row_state, tile, terms, pairs, AREA)
    return d_scores


@triton.jit
def times_slope(d_scores, slope, terms):
    """Return the gradient of scaled products; ``slope`` is that of the soft cap."""
    if terms.products.cap is None:
        return d_scores
    else:
        return d_scores * slope


@triton.jit
def add_level_slopes(sums, d_scores, tile, terms, pairs):
    """Add to ``sums``, (BLOCK, columns of levels), the derivatives of a tile's distances: those by queries' levels.

    Those by keys' levels are the same with the other sign. The sums are over the second axis of the tile.
    """
    for column in tl.static_range(terms.query_levels.width):
        differences = level_differences(terms, tile, pairs, column)
        slopes = tl.where(differences > 0.0, d_scores, tl.where(differences < 0.0, -d_scores, 0.0))
        here = tl.arange(0, sums.shape[1])[None, :] == column
        sums += tl.where(here, tl.sum(slopes, 1)[:, None], 0.0)
    return sums


@triton.jit(do_not_specialize=["batches"])
def dense_gradients(inputs, norm, d_dense, terms, pairs, batches, BLOCK: tl.constexpr):
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
        acc += square_gradients(inputs, norm, terms, pairs, place, first_row, first_key, ANY, BLOCK)
    at = d_dense.data + tl.cast(batch, tl.int64) * d_dense.batch + tl.cast(head, tl.int64) * d_dense.head
    at = at + row.to(tl.int64) * d_dense.row + column * d_dense.column
    tl.store(at, acc.to(d_dense.data.dtype.element_ty), mask=(row < pairs.n_q) & (column < pairs.n_k))
