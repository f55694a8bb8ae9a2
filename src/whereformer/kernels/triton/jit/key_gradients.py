"""The kernel of all gradients that are sums over queries; its tiles are transposed."""

# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from .areas import ANY, LEFT, RIGHT, find_query_areas
from .gradients import add_level_slopes, compute_gradients, load_row_state
from .offsets import Ends, add_at_offsets, add_ends, store_ends, zero_ends
from .tiles import BatchHead, ScoreTile, Side, load, load_side, store


class KeyBlock(NamedTuple):
    """A block of keys, with everything that is loaded once for it."""

    first_key: tl.tensor
    columns: tl.tensor  # (BLOCK_N, 1)
    side: Side
    value: tl.tensor  # (BLOCK_N, value_dim)


class KeySums(NamedTuple):
    """The running sums of the gradients of a block of keys."""

    key: tl.tensor  # (BLOCK_N, head_dim)
    value: tl.tensor  # (BLOCK_N, value_dim)
    factors: tl.tensor  # (BLOCK_N, rank)
    levels: tl.tensor  # (BLOCK_N, levels)
    query_table: Ends


@triton.jit
def _add_blocks(
    sums, keys, inputs, norm, buffer, terms, pairs, batch_head, start, end, AREA: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Add the shares of the query blocks from ``start`` to ``end`` to the sums of a block of keys.

    ``buffer`` receives the sums by offset of keys' rows; it may be None.
    """
    d_k, d_v, d_factors, d_levels, query_table = sums
    PRECISION: tl.constexpr = terms.products.precision
    for block in range(start, end):
        first_row = block * BLOCK_M
        rows = (first_row + tl.arange(0, BLOCK_M))[None, :]  # (1, BLOCK_M)
        tile = ScoreTile(batch_head, first_row, keys.first_key, rows, keys.columns)
        side = load_side(inputs.query, inputs.query_factors, batch_head, first_row, pairs.n_q, BLOCK_M)
        q, fq = side  # (BLOCK_M, head_dim), (BLOCK_M, rank)
        do = load(inputs.d_out, batch_head, first_row, pairs.n_q, BLOCK_M)  # (BLOCK_M, value_dim)
        row_state = load_row_state(norm, pairs, batch_head, rows)  # (1, BLOCK_M)
        weights, d_scores, d_products = compute_gradients(  # (BLOCK_N, BLOCK_M)
            keys.side, side, keys.value, do, row_state, tile, terms, pairs, AREA
        )
        d_v = tl.dot(weights.to(do.dtype), do, d_v, input_precision=PRECISION)  # (BLOCK_N, value_dim)
        if keys.side.vectors.type.is_block():
            d_k = tl.dot(d_products.to(q.dtype), q, d_k, input_precision=PRECISION)  # (BLOCK_N, head_dim)
        if keys.side.factors.type.is_block():
            d_factors = tl.dot(d_scores.to(fq.dtype), fq, d_factors, input_precision=PRECISION)  # (BLOCK_N, rank)
        if terms.query_levels.data is not None:
            d_levels = add_level_slopes(d_levels, d_scores, tile, terms, pairs)
        if buffer is not None:
            table = terms.query_table
            query_table = add_ends(query_table, d_scores, table.first, table.length, tile, pairs, AREA)
            if AREA != LEFT and AREA != RIGHT:
                add_at_offsets(buffer, d_scores, table, tile, pairs, BY_KEY=True)
    return KeySums(d_k, d_v, d_factors, d_levels, query_table)


@triton.jit
def _add_queries(
    sums, keys, inputs, norm, buffer, terms, pairs, batch_head, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add the shares of all queries of a head to the sums of a block of keys."""
    # Keys after the last are never stored, but the gradient of a table of queries reads their sums: mask these keys in
    # all tiles.
    beyond = buffer is not None and keys.first_key + BLOCK_N > pairs.n_k
    bounds = find_query_areas(terms, pairs, batch_head.batch, keys.first_key, beyond, BLOCK_M, BLOCK_N)
    for area in tl.static_range(ANY, LEFT - 1, -1):
        if pairs.query_positions is None and (terms.span.first is not None or (area != LEFT and area != RIGHT)):
            start, end = bounds[ANY - area], bounds[ANY - area + 1]
            sums = _add_blocks(sums, keys, inputs, norm, buffer, terms, pairs, batch_head, start, end, area, BLOCK_M)
    if pairs.query_positions is not None or pairs.min_offset is not None:
        start, end = bounds[4], bounds[5]
        sums = _add_blocks(sums, keys, inputs, norm, buffer, terms, pairs, batch_head, start, end, ANY, BLOCK_M)
    return sums


@triton.jit
def key_gradients(inputs, norm, gradients, terms, pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute all gradients that sum over queries, for one block of keys of one head.

    With factors f, levels l, and sums by offset of the table of queries::

        d_key[j] = scale * sum_i d_products[i, j] * query[i]
        d_value[j] = sum_i weights[i, j] * d_out[i]
        d_fk[j] = sum_i d_scores[i, j] * fq[i]
        d_lk[j, c] = sum_i d_scores[i, j] * sign(lq[i, c] - lk[j, c])
        sums[j, o] = sum_i d_scores[i, j] at the offset o

    The sums include the queries of all heads that share the keys.
    """
    GROUP_SIZE: tl.constexpr = inputs.value.group_size
    blocks = tl.cdiv(pairs.n_k, BLOCK_N)
    program = tl.program_id(0)
    key_heads = pairs.heads // GROUP_SIZE
    batch_head = BatchHead(program // blocks // key_heads, program // blocks % key_heads * GROUP_SIZE)
    first_key = program % blocks * BLOCK_N
    side = load_side(inputs.key, inputs.key_factors, batch_head, first_key, pairs.n_k, BLOCK_N)
    v = load(inputs.value, batch_head, first_key, pairs.n_k, BLOCK_N)  # (BLOCK_N, value_dim)
    keys = KeyBlock(first_key, (first_key + tl.arange(0, BLOCK_N))[:, None], side, v)
    sums = KeySums(
        tl.zeros([BLOCK_N, inputs.key.padded_width], tl.float32),
        tl.zeros([BLOCK_N, inputs.value.padded_width], tl.float32),
        tl.zeros([BLOCK_N, inputs.key_factors.padded_width], tl.float32),
        tl.zeros([BLOCK_N, terms.key_levels.padded_width], tl.float32),
        zero_ends(BLOCK_N),
    )
    buffer = gradients.query_table.rows
    if GROUP_SIZE == 1:
        sums = _add_queries(sums, keys, inputs, norm, buffer, terms, pairs, batch_head, BLOCK_M, BLOCK_N)
    else:
        for member in range(GROUP_SIZE):
            query_head = BatchHead(batch_head.batch, batch_head.head + member)
            sums = _add_queries(sums, keys, inputs, norm, buffer, terms, pairs, query_head, BLOCK_M, BLOCK_N)
    d_k, d_v, d_factors, d_levels, query_table = sums
    store(gradients.key, d_k * terms.products.scale, batch_head, first_key, pairs.n_k, BLOCK_N)
    store(gradients.value, d_v, batch_head, first_key, pairs.n_k, BLOCK_N)
    store(gradients.factors, d_factors, batch_head, first_key, pairs.n_k, BLOCK_N)
    store(gradients.levels, d_levels, batch_head, first_key, pairs.n_k, BLOCK_N)
    if buffer is not None:
        column = first_key + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        store_ends(gradients.query_table.ends, query_table, pairs, batch_head, column, pairs.n_k)
