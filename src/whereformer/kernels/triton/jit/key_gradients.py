"""The kernel of all gradients that are sums over queries; its tiles are transposed."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .areas import ANY, LEFT, RIGHT, query_areas
from .gradients import add_level_slopes, gradients_of, load_rows, times_slope
from .offsets import Ends, add_at_offsets, add_ends, no_ends, store_ends
from .tiles import BatchHead, ScoreTile, Side, load, load_side, store


class KeyBlock(NamedTuple):
    """A block of keys, with everything that is loaded once for it."""

    first_key: Any
    columns: Any
    side: Side
    value: Any


class KeySums(NamedTuple):
    """The running sums of the gradients of a block of keys."""

    key: Any
    value: Any
    factors: Any
    levels: Any
    query_table: Ends


@triton.jit
def _key_blocks(
    sums, keys, inputs, norm, buffer, terms, pairs, place, start, end, AREA: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Add what the query blocks from ``start`` to ``end`` contribute to the sums of a block of keys.

    ``buffer`` receives the sums by offset of keys' rows; it may be None.
    """
    d_k, d_v, d_factors, d_levels, query_table = sums
    for block in range(start, end):
        first = block * BLOCK_M
        rows = (first + tl.arange(0, BLOCK_M))[None, :]
        tile = ScoreTile(place, first, keys.first_key, rows, keys.columns)
        side = load_side(inputs.query, inputs.query_factors, place, first, pairs.n_q, BLOCK_M)
        q, fq = side
        do = load(inputs.d_out, place, first, pairs.n_q, BLOCK_M)
        row_state = load_rows(norm, pairs, place, rows)
        weights, d_scores, slope = gradients_of(keys.side, side, keys.value, do, row_state, tile, terms, pairs, AREA)
        d_v = tl.dot(weights.to(do.dtype), do, d_v, input_precision=terms.products.precision)
        if keys.side.vectors.type.is_block():
            d_products = times_slope(d_scores, slope, terms).to(q.dtype)
            d_k = tl.dot(d_products, q, d_k, input_precision=terms.products.precision)
        if keys.side.factors.type.is_block():
            d_factors = tl.dot(d_scores.to(fq.dtype), fq, d_factors, input_precision=terms.products.precision)
        if terms.query_levels.data is not None:
            d_levels = add_level_slopes(d_levels, d_scores, tile, terms, pairs)
        if buffer is not None:
            query_table = add_ends(query_table, d_scores, terms.query_table, tile, pairs, AREA)
            if AREA != LEFT and AREA != RIGHT:
                add_at_offsets(buffer, d_scores, terms.query_table, tile, pairs, BY_KEY=True)
    return KeySums(d_k, d_v, d_factors, d_levels, query_table)


@triton.jit
def _key_areas(sums, keys, inputs, norm, buffer, terms, pairs, place, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add what all queries of a head contribute to the sums of a block of keys."""
    # Keys beyond the last are never stored, but the gradient of a table of queries reads their sums: mask these keys in
    # all tiles.
    beyond = buffer is not None and keys.first_key + BLOCK_N > pairs.n_k
    bounds = query_areas(terms, pairs, place.batch, keys.first_key, beyond, BLOCK_M, BLOCK_N)
    for area in tl.static_range(ANY, LEFT - 1, -1):
        if pairs.query_positions is None and (terms.span.first is not None or (area != LEFT and area != RIGHT)):
            start, end = bounds[ANY - area], bounds[ANY - area + 1]
            sums = _key_blocks(sums, keys, inputs, norm, buffer, terms, pairs, place, start, end, area, BLOCK_M)
    if pairs.query_positions is not None or pairs.min_offset is not None:
        start, end = bounds[4], bounds[5]
        sums = _key_blocks(sums, keys, inputs, norm, buffer, terms, pairs, place, start, end, ANY, BLOCK_M)
    return sums


@triton.jit
def key_gradients(inputs, norm, gradients, terms, pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute all gradients that sum over queries, for one block of keys of one head.

    The sums include the queries of all heads that share the keys.
    """
    SHARED: tl.constexpr = inputs.value.shared
    blocks = tl.cdiv(pairs.n_k, BLOCK_N)
    program = tl.program_id(0)
    key_heads = pairs.heads // SHARED
    place = BatchHead(program // blocks // key_heads, program // blocks % key_heads * SHARED)
    first_key = program % blocks * BLOCK_N
    side = load_side(inputs.key, inputs.key_factors, place, first_key, pairs.n_k, BLOCK_N)
    v = load(inputs.value, place, first_key, pairs.n_k, BLOCK_N)
    keys = KeyBlock(first_key, (first_key + tl.arange(0, BLOCK_N))[:, None], side, v)
    sums = KeySums(
        tl.zeros([BLOCK_N, inputs.key.padded], tl.float32),
        tl.zeros([BLOCK_N, inputs.value.padded], tl.float32),
        tl.zeros([BLOCK_N, inputs.key_factors.padded], tl.float32),
        tl.zeros([BLOCK_N, terms.key_levels.padded], tl.float32),
        no_ends(BLOCK_N),
    )
    buffer = gradients.query_table.rows
    if SHARED == 1:
        sums = _key_areas(sums, keys, inputs, norm, buffer, terms, pairs, place, BLOCK_M, BLOCK_N)
    else:
        for member in range(SHARED):
            of_member = BatchHead(place.batch, place.head + member)
            sums = _key_areas(sums, keys, inputs, norm, buffer, terms, pairs, of_member, BLOCK_M, BLOCK_N)
    d_k, d_v, d_factors, d_levels, query_table = sums
    store(gradients.key, d_k * terms.products.scale, place, first_key, pairs.n_k, BLOCK_N)
    store(gradients.value, d_v, place, first_key, pairs.n_k, BLOCK_N)
    store(gradients.factors, d_factors, place, first_key, pairs.n_k, BLOCK_N)
    store(gradients.levels, d_levels, place, first_key, pairs.n_k, BLOCK_N)
    if buffer is not None:
        column = first_key + tl.arange(0, BLOCK_N)
        store_ends(gradients.query_table.ends, query_table, pairs, place, column, pairs.n_k)
