"""The gradient of a tile's scores, where all gradient kernels begin, and the kernel of dense scores' gradient."""

# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from .areas import ANY
from .scores import compute_scores, compute_weights, dropout_keep_mask, find_index, load_products, subtract_levels
from .tiles import BatchHead, ScoreTile, load, load_numbers, load_side


class RowState(NamedTuple):
    """The state of each row of a tile, in the shape of the tile's ``rows``; see ``Norm``."""

    shift: tl.tensor
    log_sum: tl.tensor
    delta: tl.tensor


@triton.jit
def load_row_state(norm, pairs, batch_head, rows):
    """Load the state of rows. Rows after the last have an infinite shift, and therefore no weights."""
    shift = load_numbers(norm.shift, norm.head_stride, pairs, batch_head, rows, float("inf"))  # rows.shape
    delta = load_numbers(norm.delta, norm.head_stride, pairs, batch_head, rows, 0.0)  # rows.shape
    if norm.log_sum is None:
        return RowState(shift, 0.0, delta)
    else:
        return RowState(shift, load_numbers(norm.log_sum, norm.head_stride, pairs, batch_head, rows, 0.0), delta)


@triton.jit
def compute_gradients(left, right, left_out, right_out, row_state, tile, terms, pairs, AREA: tl.constexpr):
    """Return the weights of a tile after dropout, and the gradients of its scores and of its scaled products.

    With the keep mask m of dropout, which is scaled, and the table of values Tv at the offset o::

        d_weights[i, j] = m[i, j] * d_out[i] . (value[j] + Tv[o])
        d_scores[i, j] = weights[i, j] * (d_weights[i, j] - delta[i])
        d_products[i, j] = d_scores[i, j] * the slope of the soft cap

    ``left`` and ``right`` are the sides of the tile's axes. ``left_out`` and ``right_out`` are the output's gradient if
    an axis is queries, values if it is keys.
    """
    scores, tangent = compute_scores(left, right, tile, terms, pairs, AREA)  # TILE
    weights = compute_weights(scores, row_state.shift, row_state.log_sum, terms)  # TILE
    d_weights = tl.zeros(scores.shape, tl.float32)  # TILE
    if terms.value_table.products is not None:
        index = find_index(terms.value_table, tile, pairs, AREA)
        if tile.first_key >= 0:  # see compute_scores
            products = load_products(terms.value_table, index, tile, pairs, AREA)  # TILE or rows.shape
            d_weights = tl.broadcast_to(products, d_weights.shape)  # TILE
    d_weights = tl.dot(left_out, tl.trans(right_out), d_weights, input_precision=terms.products.precision)  # TILE
    if pairs.dropout_seeds is not None:
        survives = dropout_keep_mask(tile, pairs)  # TILE
        d_weights = tl.where(survives, d_weights * pairs.dropout_scale, 0.0)
    d_scores = weights * (d_weights - row_state.delta)
    if pairs.dropout_seeds is not None:
        weights = tl.where(survives, weights * pairs.dropout_scale, 0.0)
    d_products = d_scores if terms.products.cap is None else d_scores * (1.0 - tangent * tangent)  # TILE
    return weights, d_scores, d_products


@triton.jit
def compute_square_gradients(
    inputs, norm, terms, pairs, batch_head, first_row, first_key, AREA: tl.constexpr, BLOCK: tl.constexpr
):
    """Load everything that a tile of scores needs, and return the gradient of the scores, (BLOCK, BLOCK)."""
    row = (first_row + tl.arange(0, BLOCK))[:, None]  # (BLOCK, 1)
    column = (first_key + tl.arange(0, BLOCK))[None, :]  # (1, BLOCK)
    queries = load_side(inputs.query, inputs.query_factors, batch_head, first_row, pairs.n_q, BLOCK)
    keys = load_side(inputs.key, inputs.key_factors, batch_head, first_key, pairs.n_k, BLOCK)
    do = load(inputs.d_out, batch_head, first_row, pairs.n_q, BLOCK)  # (BLOCK, value_dim)
    v = load(inputs.value, batch_head, first_key, pairs.n_k, BLOCK)  # (BLOCK, value_dim)
    row_state = load_row_state(norm, pairs, batch_head, row)  # (BLOCK, 1)
    tile = ScoreTile(batch_head, first_row, first_key, row, column)
    _, d_scores, _ = compute_gradients(queries, keys, do, v, row_state, tile, terms, pairs, AREA)
    return d_scores


@triton.jit
def add_level_slopes(sums, d_scores, tile, terms, pairs):
    """Add to ``sums``, (BLOCK, levels), the derivatives of a tile's distances with respect to the queries' levels.

    The derivatives with respect to the keys' levels are the same with the other sign. The sums are over the second axis
    of the tile.
    """
    for column in tl.static_range(terms.query_levels.width):
        differences = subtract_levels(terms, tile, pairs, column)  # TILE
        slopes = tl.where(differences > 0.0, d_scores, tl.where(differences < 0.0, -d_scores, 0.0))  # TILE
        is_column = tl.arange(0, sums.shape[1])[None, :] == column  # (1, levels)
        sums += tl.where(is_column, tl.sum(slopes, 1)[:, None], 0.0)  # (BLOCK, levels)
    return sums


@triton.jit(do_not_specialize=["batches"])
def dense_gradients(inputs, norm, d_dense, terms, pairs, batches, BLOCK: tl.constexpr):
    """Compute one tile of the gradient of dense scores: d_dense[i, j] = the sum of d_scores[i, j] over the ``batches``
    rows of the batch that share it."""
    key_blocks = tl.cdiv(pairs.n_k, BLOCK)
    row_blocks = tl.cdiv(pairs.n_q, BLOCK)
    program = tl.program_id(0)
    first_key = program % key_blocks * BLOCK
    first_row = program // key_blocks % row_blocks * BLOCK
    head = program // key_blocks // row_blocks % pairs.heads
    batch = program // key_blocks // row_blocks // pairs.heads
    row = first_row + tl.arange(0, BLOCK)[:, None]  # (BLOCK, 1)
    column = first_key + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)  # (BLOCK, BLOCK)
    for member in range(batches):
        batch_head = BatchHead(batch * batches + member, head)
        acc += compute_square_gradients(inputs, norm, terms, pairs, batch_head, first_row, first_key, ANY, BLOCK)
    base = d_dense.data + tl.cast(batch, tl.int64) * d_dense.batch_stride
    base = base + tl.cast(head, tl.int64) * d_dense.head_stride
    pointers = base + row.to(tl.int64) * d_dense.row_stride + column * d_dense.column_stride  # (BLOCK, BLOCK)
    tl.store(pointers, acc.to(d_dense.data.dtype.element_ty), mask=(row < pairs.n_q) & (column < pairs.n_k))
