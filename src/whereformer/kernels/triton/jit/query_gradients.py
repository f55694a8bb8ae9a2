"""The kernel of all gradients that are sums over keys."""

# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from .areas import ANY, INSIDE, LEFT, RIGHT, find_key_areas
from .gradients import add_level_slopes, compute_gradients, load_row_state
from .offsets import Ends, add_at_offsets, add_ends, add_vectors, store_ends, zero_ends
from .tiles import QueryBlock, ScoreTile, find_batch_head, load, load_side, store


class QuerySums(NamedTuple):
    """The running sums of a block of queries: its gradients, and the ends of each table."""

    query: tl.tensor  # (BLOCK_M, head_dim)
    factors: tl.tensor  # (BLOCK_M, rank)
    levels: tl.tensor  # (BLOCK_M, levels)
    key_table: Ends
    value_table: Ends
    bias: Ends


@triton.jit
def _add_key_blocks(
    sums, queries, inputs, gradients, terms, pairs, start, end, AREA: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add the shares of the key blocks from ``start`` to ``end`` to the sums of a block of queries."""
    d_q, d_factors, d_levels, key_table, value_table, bias = sums
    PRECISION: tl.constexpr = terms.products.precision
    for block in range(start, end):
        first_key = block * BLOCK_N
        columns = (first_key + tl.arange(0, BLOCK_N))[None, :]  # (1, BLOCK_N)
        tile = ScoreTile(queries.batch_head, queries.first_row, first_key, queries.rows, columns)
        keys = load_side(inputs.key, inputs.key_factors, tile.batch_head, first_key, pairs.n_k, BLOCK_N)
        k, fk = keys  # (BLOCK_N, head_dim), (BLOCK_N, rank)
        v = load(inputs.value, tile.batch_head, first_key, pairs.n_k, BLOCK_N)  # (BLOCK_N, value_dim)
        weights, d_scores, d_products = compute_gradients(  # (BLOCK_M, BLOCK_N)
            queries.side, keys, queries.d_out, v, queries.row_state, tile, terms, pairs, AREA
        )
        if queries.side.vectors.type.is_block():
            d_q = tl.dot(d_products.to(k.dtype), k, d_q, input_precision=PRECISION)  # (BLOCK_M, head_dim)
        if queries.side.factors.type.is_block():
            d_factors = tl.dot(d_scores.to(fk.dtype), fk, d_factors, input_precision=PRECISION)  # (BLOCK_M, rank)
        if terms.query_levels.data is not None:
            d_levels = add_level_slopes(d_levels, d_scores, tile, terms, pairs)
        if gradients.key_table.rows is not None:
            key_table = add_ends(key_table, d_scores, terms.key_table.first, terms.key_table.length, tile, pairs, AREA)
        if gradients.value_table.rows is not None:
            table = terms.value_table
            value_table = add_ends(value_table, weights, table.first, table.length, tile, pairs, AREA)
        if gradients.bias.ends is not None:
            first = terms.bias.offset_stop - terms.bias.length
            bias = add_ends(bias, d_scores, first, terms.bias.length, tile, pairs, AREA)
        if AREA != LEFT and AREA != RIGHT:
            if gradients.key_table.rows is not None:
                add_at_offsets(gradients.key_table.rows, d_scores, terms.key_table, tile, pairs)
            if gradients.value_table.rows is not None:
                add_at_offsets(gradients.value_table.rows, weights, terms.value_table, tile, pairs)
    return QuerySums(d_q, d_factors, d_levels, key_table, value_table, bias)


@triton.jit
def query_gradients(inputs, norm, gradients, key_vectors, terms, pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute all gradients that sum over keys, for one block of queries of one head.

    With factors f, levels l, and sums by offset of the table of keys; the table of values has sums of weights::

        sums[i, o] = sum_j d_scores[i, j] at the offset o
        d_query[i] = scale * (sum_j d_products[i, j] * key[j] + sum_o sums[i, o] * key_vectors[o])
        d_fq[i] = sum_j d_scores[i, j] * fk[j]
        d_lq[i, c] = -sum_j d_scores[i, j] * sign(lq[i, c] - lk[j, c])

    ``key_vectors`` is the table that the queries meet, (batch, heads, T, head_dim); without data if they meet none.
    """
    blocks = tl.cdiv(pairs.n_q, BLOCK_M)
    program = tl.program_id(0)
    batch_head = find_batch_head(program, blocks, pairs)
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    rows = row[:, None]  # (BLOCK_M, 1)
    side = load_side(inputs.query, inputs.query_factors, batch_head, first_row, pairs.n_q, BLOCK_M)
    do = load(inputs.d_out, batch_head, first_row, pairs.n_q, BLOCK_M)  # (BLOCK_M, value_dim)
    queries = QueryBlock(batch_head, first_row, rows, side, do, load_row_state(norm, pairs, batch_head, rows))
    sums = QuerySums(
        tl.zeros([BLOCK_M, inputs.query.padded_width], tl.float32),
        tl.zeros([BLOCK_M, inputs.query_factors.padded_width], tl.float32),
        tl.zeros([BLOCK_M, terms.query_levels.padded_width], tl.float32),
        zero_ends(BLOCK_M),
        zero_ends(BLOCK_M),
        zero_ends(BLOCK_M),
    )
    bounds, _ = find_key_areas(terms, pairs, batch_head.batch, first_row, BLOCK_M, BLOCK_N)
    if pairs.query_positions is None and pairs.min_offset is not None:
        sums = _add_key_blocks(sums, queries, inputs, gradients, terms, pairs, bounds[0], bounds[1], ANY, BLOCK_N)
    for area in tl.static_range(LEFT, ANY + 1):
        if area == ANY or (pairs.query_positions is None and (area == INSIDE or terms.span.first is not None)):
            start, end = bounds[area + 2], bounds[area + 3]
            sums = _add_key_blocks(sums, queries, inputs, gradients, terms, pairs, start, end, area, BLOCK_N)
    d_q = sums.query  # (BLOCK_M, head_dim)
    if key_vectors.data is not None:
        ends, rows = sums.key_table, gradients.key_table.rows
        d_q = add_vectors(
            d_q, ends, rows, key_vectors, terms.key_table, terms, pairs, batch_head, first_row, tl.float32, BLOCK_M
        )
    store(gradients.query, d_q * terms.products.scale, batch_head, first_row, pairs.n_q, BLOCK_M)
    store(gradients.factors, sums.factors, batch_head, first_row, pairs.n_q, BLOCK_M)
    # Distances are subtracted.
    store(gradients.levels, -sums.levels, batch_head, first_row, pairs.n_q, BLOCK_M)
    if gradients.key_table.rows is not None:
        store_ends(gradients.key_table.ends, sums.key_table, pairs, batch_head, row, pairs.n_q)
    if gradients.value_table.rows is not None:
        store_ends(gradients.value_table.ends, sums.value_table, pairs, batch_head, row, pairs.n_q)
    if gradients.bias.ends is not None:
        store_ends(gradients.bias.ends, sums.bias, pairs, batch_head, row, pairs.n_q)
