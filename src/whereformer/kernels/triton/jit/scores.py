"""The scores of a tile, in units of log2, and the weights that dropout keeps."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import ANY, LEFT, RIGHT
from .tiles import beside_products, head_index, load_column, load_numbers

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2.3586e38)  # times log2(e), this is still a finite float32
MOST_BIAS = tl.constexpr(8.507058665963221e37)  # a quarter of the largest finite number
SATURATED = tl.constexpr(44.0)  # the hyperbolic tangent of this is 1
WIDEST_BAND = tl.constexpr(8)  # the largest sum of strides with which a tile's offsets fit into shared memory


@triton.jit
def offsets_of(tile, pairs):
    """Return the offsets of a tile's pairs."""
    rows, columns, batch = tile.rows, tile.columns, tile.place.batch
    if pairs.query_positions is None:
        return columns * pairs.key_stride - rows * pairs.query_stride + pairs.start
    else:
        query_at = pairs.query_positions + batch * pairs.query_positions_batch + rows
        key_at = pairs.key_positions + batch * pairs.key_positions_batch + columns
        query_positions = tl.load(query_at, mask=rows < pairs.n_q, other=0)
        return tl.load(key_at, mask=columns < pairs.n_k, other=0) - query_positions


@triton.jit
def _clamped(column, length):
    return tl.minimum(tl.maximum(column, 0), length - 1)


@triton.jit
def columns_of(tile, first, pairs):
    """Return the columns of a tile's pairs in a table from the offset ``first`` on, as a sum: by key and by query.

    In a loop over keys, the part by key does not change if positions are affine.
    """
    if pairs.query_positions is None:
        by_query = tile.first_key * pairs.key_stride + pairs.start - first - tile.rows * pairs.query_stride
        return (tile.columns - tile.first_key) * pairs.key_stride, by_query
    else:
        return offsets_of(tile, pairs) - first, tl.zeros_like(tile.rows)


@triton.jit
def products_index(table, tile, pairs, AREA: tl.constexpr, BY_KEY: tl.constexpr = False):
    """Return the indices of a tile's pairs in the rows of products with a table of vectors, a row for each query.

    BY_KEY, each key has a row.
    If two tables begin and end at the same offsets, the compiler computes the indices once.
    """
    first = (tile.columns - tile.first_key) * table.length if BY_KEY else (tile.rows - tile.first_row) * table.length
    if AREA == LEFT:
        return first
    elif AREA == RIGHT:
        return first + (table.length - 1)
    else:
        by_key, by_query = columns_of(tile, table.first, pairs)
        return tl.minimum(tl.maximum(by_key + (by_query + first), first), first + (table.length - 1))


@triton.jit
def from_products(table, index, tile, pairs, AREA: tl.constexpr, BY_KEY: tl.constexpr = False):
    """Return what the products with a table of vectors give for each pair of a tile; see :func:`products_index`."""
    if BY_KEY:
        at = table.products + (head_index(pairs, tile.place) * pairs.n_k + tile.first_key) * table.length
        there = tile.columns < pairs.n_k
        left = pairs.n_k - tile.first_key
        ROWS: tl.constexpr = tile.columns.numel
    else:
        at = table.products + (head_index(pairs, tile.place) * pairs.n_q + tile.first_row) * table.length
        there = tile.rows < pairs.n_q
        left = pairs.n_q - tile.first_row
        ROWS: tl.constexpr = tile.rows.numel
    WITHIN: tl.constexpr = AREA != LEFT and AREA != RIGHT
    if WITHIN and table.room is not None:
        # Load each product that the tile reads once, and gather the tile from these in shared memory.
        number = tl.arange(0, ROWS * table.room)
        numbers = tl.load(at + number, mask=number < left * table.length, other=0.0)
        return tl.reshape(tl.gather(numbers, tl.reshape(index, [index.numel]), 0), index.shape)
    else:
        products = tl.load(at + index, mask=there, other=0.0)
        if WITHIN:
            products = beside_products(products)
        return products


@triton.jit
def _from_bias(bias, tile, offsets, pairs, AREA: tl.constexpr):
    """Return what the table of numbers adds to each pair of a tile; one number if the tile is LEFT or RIGHT."""
    table = bias.data + tile.place.head * bias.length
    if AREA == LEFT:
        return _log2(tl.load(table))
    elif AREA == RIGHT:
        return _log2(tl.load(table + bias.length - 1))
    elif pairs.query_positions is None and pairs.query_stride + pairs.key_stride <= WIDEST_BAND:
        return _from_band(table, bias, tile, pairs)
    else:
        return _log2(beside_products(tl.load(table + _clamped(offsets - (bias.end - bias.length), bias.length))))


@triton.jit
def _log2(bias):
    """Return numbers of a bias in units of log2."""
    # The lowest finite number, which masks often contain, must stay finite: only -inf forbids a pair.
    bias = bias.to(tl.float32)
    return tl.where(bias == float("-inf"), bias, _bounded(bias, MOST_BIAS) * LOG2E)


@triton.jit
def _from_band(table, bias, tile, pairs):
    """Load each number that a tile reads once, and gather the tile from these.

    The gather is from shared memory, and pairs of a thread that have the same offset share a load. Indices of one
    dimension let the compiler gather in the layout of the product to which the numbers are added.
    """
    M: tl.constexpr = tile.rows.numel
    N: tl.constexpr = tile.columns.numel
    # The offset of the last row and the first column is the lowest.
    low = pairs.start + tile.first_key * pairs.key_stride - (tile.first_row + M - 1) * pairs.query_stride
    WIDTH: tl.constexpr = triton.next_power_of_2(M * pairs.query_stride + N * pairs.key_stride)
    band = _log2(tl.load(table + _clamped(low - (bias.end - bias.length) + tl.arange(0, WIDTH), bias.length)))
    pair = tl.arange(0, M * N)
    if tile.rows.shape[0] == 1:
        index = (pair // M) * pairs.key_stride + (M - 1 - pair % M) * pairs.query_stride
        return tl.reshape(tl.gather(band, index, 0), [N, M])
    else:
        index = (pair % N) * pairs.key_stride + (M - 1 - pair // N) * pairs.query_stride
        return tl.reshape(tl.gather(band, index, 0), [M, N])


@triton.jit
def _from_dense(dense, tile, pairs):
    """Load dense scores, in float32."""
    rows, columns = tile.rows, tile.columns
    at = (
        dense.data + tl.cast(tile.place.batch, tl.int64) * dense.batch + tl.cast(tile.place.head, tl.int64) * dense.head
    )
    at = at + rows.to(tl.int64) * dense.row + columns.to(tl.int64) * dense.column
    added = tl.load(at, mask=(rows < pairs.n_q) & (columns < pairs.n_k), other=0.0)
    added = beside_products(added).to(tl.float32)
    # The lowest finite number must stay finite: only -inf forbids a pair.
    return tl.where(added == float("-inf"), added, tl.maximum(added, LOWEST))


@triton.jit
def level_differences(terms, tile, pairs, COLUMN: tl.constexpr):
    """Return the level of each query less that of each key."""
    of_queries = load_column(terms.query_levels, tile.place, tile.rows, pairs.n_q, COLUMN)
    return of_queries - load_column(terms.key_levels, tile.place, tile.columns, pairs.n_k, COLUMN)


@triton.jit
def scores_of(left, right, tile, terms, pairs, AREA: tl.constexpr):
    """Return the scores of a tile, -inf where a pair may not attend; ``left`` and ``right`` are the sides of its axes.

    If nothing is added to products (``products.last``) they are not scaled yet: :func:`weights_of` does it. The second
    result is the hyperbolic tangent in a soft cap; 0 without a cap.

    The compiler may round a product and a sum once or twice. Beside a large number this gives different scores, but
    forward and backward must compute the same ones; so products that are added to large numbers are explicit fused
    multiply-adds.
    """
    rows, columns = tile.rows, tile.columns
    CAPS_PRODUCTS: tl.constexpr = terms.products.cap is not None
    ADDED: tl.constexpr = not CAPS_PRODUCTS and not left.factors.type.is_block()
    WITH_BIAS: tl.constexpr = ADDED and terms.bias.data is not None
    WITH_KEYS: tl.constexpr = ADDED and not WITH_BIAS and terms.key_table.products is not None
    WITH_QUERIES: tl.constexpr = ADDED and not WITH_BIAS and not WITH_KEYS and terms.query_table.products is not None
    capped = 0.0
    if left.vectors.type.is_block():
        scores = tl.dot(left.vectors, tl.trans(right.vectors), input_precision=terms.products.precision)
        if not (WITH_BIAS or WITH_KEYS or WITH_QUERIES or terms.products.last):
            scores *= terms.products.log2
        if CAPS_PRODUCTS:
            capped = _tanh(_bounded(scores, SATURATED))
            scores = capped * terms.products.cap
    else:
        scores = tl.zeros_like((rows + columns).to(tl.float32))
    if left.factors.type.is_block():
        factors = tl.dot(left.factors, tl.trans(right.factors), input_precision=terms.products.precision)
        scores = tl.fma(factors, LOG2E, scores)
    offsets = offsets_of(tile, pairs)
    if terms.key_table.products is not None:
        index = products_index(terms.key_table, tile, pairs, AREA)
    if terms.query_table.products is not None:
        key_rows_index = products_index(terms.query_table, tile, pairs, AREA, BY_KEY=True)
    # No key has a negative index, so this always holds. Without the condition, Triton's pipeliner would stage these
    # loads through shared memory, which wastes room and time on numbers that are gathered one by one.
    if tile.first_key >= 0:
        if terms.bias.data is not None:
            bias = _from_bias(terms.bias, tile, offsets, pairs, AREA)
            if WITH_BIAS:
                scores = tl.fma(scores, terms.products.log2, bias)
            else:
                scores += bias
        if terms.key_table.products is not None:
            products = from_products(terms.key_table, index, tile, pairs, AREA)
            if WITH_KEYS:
                scores = tl.fma(scores, terms.products.log2, products)
            else:
                scores += products
        if terms.query_table.products is not None:
            products = from_products(terms.query_table, key_rows_index, tile, pairs, AREA, BY_KEY=True)
            if WITH_QUERIES:
                scores = tl.fma(scores, terms.products.log2, products)
            else:
                scores += products
        if terms.query_levels.data is not None:
            for column in tl.static_range(terms.query_levels.width):
                distances = tl.abs(level_differences(terms, tile, pairs, column))
                scores = tl.fma(distances, -LOG2E, scores)
        if terms.dense.data is not None:
            scores = tl.fma(_from_dense(terms.dense, tile, pairs), LOG2E, scores)
    if AREA == ANY:
        scores = tl.where(_allowed(tile, offsets, pairs), scores, float("-inf"))
    batch = tile.place.batch
    if pairs.key_mask is not None:
        may = tl.load(pairs.key_mask + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(may != 0, scores, float("-inf"))
    if pairs.query_documents is not None:
        document = tl.load(pairs.query_documents + batch * pairs.n_q + rows, mask=rows < pairs.n_q, other=0)
        same = document == tl.load(pairs.key_documents + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(same, scores, float("-inf"))
    return scores, capped


@triton.jit
def _allowed(tile, offsets, pairs):
    """Return which pairs of a tile have a key and an offset that is allowed."""
    columns = tile.columns
    if pairs.query_positions is None:
        # Two bounds for each row, in units of positions after the tile's first key: in a loop over keys, theirs are
        # always the same.
        key = (columns - tile.first_key) * pairs.key_stride
        first_offset = pairs.start + tile.first_key * pairs.key_stride - tile.rows * pairs.query_stride
        last = (pairs.n_k - 1 - tile.first_key) * pairs.key_stride
        if pairs.max_offset is not None:
            last = tl.minimum(pairs.max_offset - first_offset, last)
        allowed = key <= last
        if pairs.min_offset is not None:
            allowed = allowed & (key >= pairs.min_offset - first_offset)
    else:
        allowed = columns < pairs.n_k
        if pairs.max_offset is not None:
            allowed = allowed & (offsets <= pairs.max_offset)
        if pairs.min_offset is not None:
            allowed = allowed & (offsets >= pairs.min_offset)
    return allowed


@triton.jit
def _bounded(x, most):
    """Bound numbers on both sides. NaN stays NaN, which hardware's minimum and maximum otherwise drop."""
    x = tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent, to about a unit in the last place: near 0 by Cephes's polynomial.

    The numbers are between -SATURATED and SATURATED.
    """
    square = x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = (near * square - 5.37397155531e-2) * square + 1.33314422036e-1
    near = (near * square - 3.33332819422e-1) * square * x + x
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def weights_of(scores, shift, log_sum, terms):
    """Return the weights of scores; see ``Norm``."""
    if terms.products.last:
        return tl.exp2(tl.fma(scores, terms.products.log2, -shift) - log_sum)
    else:
        # The order matters: the difference of large numbers is exact, so the small number subtracted after is not lost.
        return tl.exp2((scores - shift) - log_sum)


@triton.jit
def kept(tile, pairs):
    """Return which weights of a tile survive dropout, like ``keep_mask`` in ``dropout.py``."""
    mixed = load_numbers(pairs.dropout_seeds, pairs.n_q, pairs, tile.place, tile.rows, 0).to(tl.uint32, bitcast=True)
    mixed = mixed + tile.columns.to(tl.uint32) * 0x9E3779B9
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return mixed >= tl.cast(pairs.dropout_threshold, tl.uint32)
