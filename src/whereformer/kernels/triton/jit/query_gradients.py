"""The kernel of all gradients that are sums over keys."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .areas import ANY, INSIDE, LEFT, RIGHT, key_areas
from .gradients import add_level_slopes, gradients_of, load_rows, times_slope
from .offsets import Columns, Ends, add_at_offsets, add_ends, add_vectors, no_ends, store_ends
from .tiles import QueryBlock, ScoreTile, load, load_side, place_of, store


class QuerySums(NamedTuple):
    """The running sums of a block of queries: its gradients, and those of the ends of each table."""

    query: Any
    factors: Any
    levels: Any
    key_table: Ends
    value_table: Ends
    bias: Ends


@triton.jit
def _query_blocks(
    sums, queries, inputs, gradients, terms, pairs, start, end, AREA: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add what the key blocks from ``start`` to ``end`` contribute to the sums of a block of queries."""
    d_q, d_factors, d_levels, key_table, value_table, bias = sums
    for block in range(start, end):
        first = block * BLOCK_N
        columns = (first + tl.arange(0, BLOCK_N))[None, :]
        tile = ScoreTile(queries.place, queries.first_row, first, queries.rows, columns)
        keys = load_side(inputs.key, inputs.key_factors, tile.place, first, pairs.n_k, BLOCK_N)
        v = load(inputs.value, tile.place, first, pairs.n_k, BLOCK_N)
        weights, d_scores, slope = gradients_of(
            queries.side, keys, queries.d_out, v, queries.row_state, tile, terms, pairs, AREA
        )
        if queries.side.vectors.type.is_block():
            d_products = times_slope(d_scores, slope, terms).to(keys.vectors.dtype)
            d_q = tl.dot(d_products, keys.vectors, d_q, input_precision=terms.products.precision)
        if queries.side.factors.type.is_block():
            d_factors = tl.dot(
                d_scores.to(keys.factors.dtype), keys.factors, d_factors, input_precision=terms.products.precision
            )
        if terms.query_levels.data is not None:
            d_levels = add_level_slopes(d_levels, d_scores, tile, terms, pairs)
        if gradients.key_table.rows is not None:
            key_table = add_ends(key_table, d_scores, terms.key_table, tile, pairs, AREA)
        if gradients.value_table.rows is not None:
            value_table = add_ends(value_table, weights, terms.value_table, tile, pairs, AREA)
        if gradients.bias.ends is not None:
            columns_of_bias = Columns(terms.bias.end - terms.bias.length, terms.bias.length)
            bias = add_ends(bias, d_scores, columns_of_bias, tile, pairs, AREA)
        if AREA != LEFT and AREA != RIGHT:
            if gradients.key_table.rows is not None:
                add_at_offsets(gradients.key_table.rows, d_scores, terms.key_table, tile, pairs)
            if gradients.value_table.rows is not None:
                add_at_offsets(gradients.value_table.rows, weights, terms.value_table, tile, pairs)
    return QuerySums(d_q, d_factors, d_levels, key_table, value_table, bias)


@triton.jit
def query_gradients(inputs, norm, gradients, key_vectors, terms, pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute all gradients that sum over keys, for one block of queries of one head.

    ``key_vectors`` is the table that the queries meet, (batch, heads, T, head_dim); without data if they meet none.
    """
    blocks = tl.cdiv(pairs.n_q, BLOCK_M)
    program = tl.program_id(0)
    place = place_of(program, blocks, pairs)
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    rows = row[:, None]
    side = load_side(inputs.query, inputs.query_factors, place, first_row, pairs.n_q, BLOCK_M)
    do = load(inputs.d_out, place, first_row, pairs.n_q, BLOCK_M)
    queries = QueryBlock(place, first_row, rows, side, do, load_rows(norm, pairs, place, rows))
    sums = QuerySums(
        tl.zeros([BLOCK_M, inputs.query.padded], tl.float32),
        tl.zeros([BLOCK_M, inputs.query_factors.padded], tl.float32),
        tl.zeros([BLOCK_M, terms.query_levels.padded], tl.float32),
        no_ends(BLOCK_M),
        no_ends(BLOCK_M),
        no_ends(BLOCK_M),
    )
    bounds, _ = key_areas(terms, pairs, place.batch, first_row, BLOCK_M, BLOCK_N)
    if pairs.query_positions is None and pairs.min_offset is not None:
        sums = _query_blocks(sums, queries, inputs, gradients, terms, pairs, bounds[0], bounds[1], ANY, BLOCK_N)
    for area in tl.static_range(LEFT, ANY + 1):
        if area == ANY or (pairs.query_positions is None and (area == INSIDE or terms.span.first is not None)):
            start, end = bounds[area + 2], bounds[area + 3]
            sums = _query_blocks(sums, queries, inputs, gradients, terms, pairs, start, end, area, BLOCK_N)
    d_q = sums.query  # [BLOCK_M, head_dim]
    if key_vectors.data is not None:
        ends, rows = sums.key_table, gradients.key_table.rows
        d_q = add_vectors(
            d_q, ends, rows, key_vectors, terms.key_table, terms, pairs, place, first_row, tl.float32, BLOCK_M
        )
    store(gradients.query, d_q * terms.products.scale, place, first_row, pairs.n_q, BLOCK_M)
    store(gradients.factors, sums.factors, place, first_row, pairs.n_q, BLOCK_M)
    # Distances are subtracted.
    store(gradients.levels, -sums.levels, place, first_row, pairs.n_q, BLOCK_M)
    if gradients.key_table.rows is not None:
        store_ends(gradients.key_table.ends, sums.key_table, pairs, place, row, pairs.n_q)
    if gradients.value_table.rows is not None:
        store_ends(gradients.value_table.ends, sums.value_table, pairs, place, row, pairs.n_q)
    if gradients.bias.ends is not None:
        store_ends(gradients.bias.ends, sums.bias, pairs, place, row, pairs.n_q)
