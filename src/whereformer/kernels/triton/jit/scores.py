"""The scores of a tile, in units of log2, and the weights that survive dropout."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import ANY, LEFT, RIGHT, clamp
from .tiles import convert_to_product_layout, head_index, load_column, load_numbers

LOG2E = tl.constexpr(1.4426950408889634)
MIN_DENSE = tl.constexpr(-2.3586e38)  # times log2(e), this is still a finite float32
MAX_BIAS = tl.constexpr(8.507058665963221e37)  # a quarter of the largest finite number
SATURATED = tl.constexpr(44.0)  # the hyperbolic tangent of this is 1
MAX_BAND_STRIDE = tl.constexpr(8)  # up to this sum of strides, a tile's offsets fit into shared memory


@triton.jit
def compute_offsets(tile, pairs):
    """Return the offsets of a tile's pairs: the key's position minus the query's."""
    rows, columns, batch = tile.rows, tile.columns, tile.batch_head.batch
    if pairs.query_positions is None:
        return columns * pairs.key_stride - rows * pairs.query_stride + pairs.start  # TILE
    else:
        query_pointers = pairs.query_positions + batch * pairs.query_positions_stride + rows
        key_pointers = pairs.key_positions + batch * pairs.key_positions_stride + columns
        query_positions = tl.load(query_pointers, mask=rows < pairs.n_q, other=0)  # rows.shape
        return tl.load(key_pointers, mask=columns < pairs.n_k, other=0) - query_positions  # TILE


@triton.jit
def find_columns(tile, first, pairs):
    """Return the columns of a tile's pairs in a table from the offset ``first`` on, as a sum: by key and by query.

    In a loop over keys, the part by key does not change if positions are affine.
    """
    if pairs.query_positions is None:
        by_query = tile.first_key * pairs.key_stride + pairs.start - first - tile.rows * pairs.query_stride
        return (tile.columns - tile.first_key) * pairs.key_stride, by_query  # columns.shape, rows.shape
    else:
        return compute_offsets(tile, pairs) - first, tl.zeros_like(tile.rows)  # TILE, rows.shape


@triton.jit
def find_index(table, tile, pairs, AREA: tl.constexpr, BY_KEY: tl.constexpr = False):
    """Return the indices of a tile's pairs in the rows of products with a table of vectors, a row for each query.

    BY_KEY, each key has a row.
    If two tables begin and end at the same offsets, the compiler computes the indices once.
    """
    first = (tile.columns - tile.first_key) * table.length if BY_KEY else (tile.rows - tile.first_row) * table.length
    if AREA == LEFT:
        return first  # rows.shape; BY_KEY, columns.shape
    elif AREA == RIGHT:
        return first + (table.length - 1)  # likewise
    else:
        by_key, by_query = find_columns(tile, table.first, pairs)
        return clamp(by_key + (by_query + first), first, first + (table.length - 1))  # TILE


@triton.jit
def load_products(table, index, tile, pairs, AREA: tl.constexpr, BY_KEY: tl.constexpr = False):
    """Load the product with a table's vector for each pair of a tile; see :func:`find_index`."""
    rows = tile.columns if BY_KEY else tile.rows
    first_row = tile.first_key if BY_KEY else tile.first_row
    n = pairs.n_k if BY_KEY else pairs.n_q
    pointers = table.products + (head_index(pairs, tile.batch_head) * n + first_row) * table.length
    WITHIN: tl.constexpr = AREA != LEFT and AREA != RIGHT
    if WITHIN and table.padded_length is not None:
        # Load each product that the tile reads once, and gather the tile from these in shared memory.
        number = tl.arange(0, rows.numel * table.padded_length)  # (rows.numel * padded_length,)
        numbers = tl.load(pointers + number, mask=number < (n - first_row) * table.length, other=0.0)
        return tl.reshape(tl.gather(numbers, tl.reshape(index, [index.numel]), 0), index.shape)  # TILE
    else:
        products = tl.load(pointers + index, mask=rows < n, other=0.0)  # index.shape
        if WITHIN:
            products = convert_to_product_layout(products)  # TILE
        return products


@triton.jit
def _load_bias(bias, tile, offsets, pairs, AREA: tl.constexpr):
    """Load the table's number for each pair of a tile, TILE; one number if the tile is LEFT or RIGHT."""
    table = bias.data + tile.batch_head.head * bias.length
    if AREA == LEFT:
        return _to_log2(tl.load(table))  # ()
    elif AREA == RIGHT:
        return _to_log2(tl.load(table + bias.length - 1))  # ()
    elif pairs.query_positions is None and pairs.query_stride + pairs.key_stride <= MAX_BAND_STRIDE:
        return _load_band(table, bias, tile, pairs)  # TILE
    else:
        pointers = table + clamp(offsets - (bias.offset_stop - bias.length), 0, bias.length - 1)  # TILE
        return _to_log2(convert_to_product_layout(tl.load(pointers)))  # TILE


@triton.jit
def _to_log2(bias):
    """Return numbers of a bias in units of log2."""
    # The lowest finite number, which masks often contain, must stay finite: only -inf forbids a pair.
    bias = bias.to(tl.float32)
    return tl.where(bias == float("-inf"), bias, _bound(bias, MAX_BIAS) * LOG2E)


@triton.jit
def _load_band(table, bias, tile, pairs):
    """Load each number that a tile reads once, and gather the tile from these.

    The gather is from shared memory, and pairs of a thread that have the same offset share a load. Indices of one
    dimension let the compiler gather in the layout of the product to which the numbers are added.
    """
    M: tl.constexpr = tile.rows.numel
    N: tl.constexpr = tile.columns.numel
    # The offset of the last row and the first column is the lowest.
    low = pairs.start + tile.first_key * pairs.key_stride - (tile.first_row + M - 1) * pairs.query_stride
    WIDTH: tl.constexpr = triton.next_power_of_2(M * pairs.query_stride + N * pairs.key_stride)
    pointers = table + clamp(low - (bias.offset_stop - bias.length) + tl.arange(0, WIDTH), 0, bias.length - 1)
    band = _to_log2(tl.load(pointers))  # (WIDTH,)
    pair = tl.arange(0, M * N)
    if tile.rows.shape[0] == 1:
        index = (pair // M) * pairs.key_stride + (M - 1 - pair % M) * pairs.query_stride  # (N * M,)
        return tl.reshape(tl.gather(band, index, 0), [N, M])  # TILE, transposed
    else:
        index = (pair % N) * pairs.key_stride + (M - 1 - pair // N) * pairs.query_stride  # (M * N,)
        return tl.reshape(tl.gather(band, index, 0), [M, N])  # TILE


@triton.jit
def _load_dense(dense, tile, pairs):
    """Load dense scores, TILE in float32."""
    rows, columns, batch, head = tile.rows, tile.columns, tile.batch_head.batch, tile.batch_head.head
    base = dense.data + tl.cast(batch, tl.int64) * dense.batch_stride + tl.cast(head, tl.int64) * dense.head_stride
    pointers = base + rows.to(tl.int64) * dense.row_stride + columns.to(tl.int64) * dense.column_stride  # TILE
    scores = tl.load(pointers, mask=(rows < pairs.n_q) & (columns < pairs.n_k), other=0.0)  # TILE
    scores = convert_to_product_layout(scores).to(tl.float32)
    # The lowest finite number must stay finite: only -inf forbids a pair.
    return tl.where(scores == float("-inf"), scores, tl.maximum(scores, MIN_DENSE))


@triton.jit
def subtract_levels(terms, tile, pairs, COLUMN: tl.constexpr):
    """Return the level of each query minus the level of each key."""
    query_levels = load_column(terms.query_levels, tile.batch_head, tile.rows, pairs.n_q, COLUMN)  # rows.shape
    return query_levels - load_column(terms.key_levels, tile.batch_head, tile.columns, pairs.n_k, COLUMN)  # TILE


@triton.jit
def compute_scores(left, right, tile, terms, pairs, AREA: tl.constexpr):
    """Return the scores of a tile, -inf where a pair may not attend; ``left`` and ``right`` are the sides of its axes.

    With the query's row q, factors f, levels l and tables T at the offset o = key position - query position::

        scores[i, j] = log2(e) * (cap(scale * q[i] . k[j]) + fq[i] . fk[j] + bias[o] + scale * q[i] . Tk[o]
                                  + Tq[o] . k'[j] - sum_c |lq[i, c] - lk[j, c]| + dense[i, j])

    where k' are the factors that the table of queries meets. If nothing is added to products
    (``products.is_scaled_last``), they are not scaled yet: :func:`compute_weights` does it. The second result is the
    hyperbolic tangent in a soft cap, cap(x) = softcap * tanh(x / softcap); 0 without a cap.

    The compiler may round a product and a sum once or twice. Next to a large number this gives different scores, but
    forward and backward must compute the same ones; so products that are added to large numbers are explicit fused
    multiply-adds.
    """
    rows, columns = tile.rows, tile.columns
    CAPS_PRODUCTS: tl.constexpr = terms.products.cap is not None
    ADDED: tl.constexpr = not CAPS_PRODUCTS and not left.factors.type.is_block()
    WITH_BIAS: tl.constexpr = ADDED and terms.bias.data is not None
    WITH_KEYS: tl.constexpr = ADDED and not WITH_BIAS and terms.key_table.products is not None
    WITH_QUERIES: tl.constexpr = ADDED and not WITH_BIAS and not WITH_KEYS and terms.query_table.products is not None
    tangent = 0.0
    if left.vectors.type.is_block():
        scores = tl.dot(left.vectors, tl.trans(right.vectors), input_precision=terms.products.precision)  # TILE
        if not (WITH_BIAS or WITH_KEYS or WITH_QUERIES or terms.products.is_scaled_last):
            scores *= terms.products.log2_scale
        if CAPS_PRODUCTS:
            tangent = _tanh(_bound(scores, SATURATED))  # TILE
            scores = tangent * terms.products.cap
    else:
        scores = tl.zeros_like((rows + columns).to(tl.float32))  # TILE
    if left.factors.type.is_block():
        factors = tl.dot(left.factors, tl.trans(right.factors), input_precision=terms.products.precision)  # TILE
        scores = tl.fma(factors, LOG2E, scores)
    offsets = compute_offsets(tile, pairs)  # TILE
    if terms.key_table.products is not None:
        index = find_index(terms.key_table, tile, pairs, AREA)
    if terms.query_table.products is not None:
        index_by_key = find_index(terms.query_table, tile, pairs, AREA, BY_KEY=True)
    # No key has a negative index, so this always holds. Without the condition, Triton's pipeliner would stage these
    # loads through shared memory, which wastes room and time on numbers that are gathered one by one.
    if tile.first_key >= 0:
        if terms.bias.data is not None:
            bias = _load_bias(terms.bias, tile, offsets, pairs, AREA)  # TILE or ()
            scores = tl.fma(scores, terms.products.log2_scale, bias) if WITH_BIAS else scores + bias
        if terms.key_table.products is not None:
            products = load_products(terms.key_table, index, tile, pairs, AREA)  # TILE or rows.shape
            scores = tl.fma(scores, terms.products.log2_scale, products) if WITH_KEYS else scores + products
        if terms.query_table.products is not None:
            # TILE or columns.shape
            products = load_products(terms.query_table, index_by_key, tile, pairs, AREA, BY_KEY=True)
            scores = tl.fma(scores, terms.products.log2_scale, products) if WITH_QUERIES else scores + products
        if terms.query_levels.data is not None:
            for column in tl.static_range(terms.query_levels.width):
                distances = tl.abs(subtract_levels(terms, tile, pairs, column))  # TILE
                scores = tl.fma(distances, -LOG2E, scores)
        if terms.dense.data is not None:
            scores = tl.fma(_load_dense(terms.dense, tile, pairs), LOG2E, scores)
    if AREA == ANY:
        scores = tl.where(_find_allowed(tile, offsets, pairs), scores, float("-inf"))
    batch = tile.batch_head.batch
    if pairs.key_mask is not None:
        # columns.shape
        is_key = tl.load(pairs.key_mask + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(is_key != 0, scores, float("-inf"))
    if pairs.query_documents is not None:
        # rows.shape, TILE
        document = tl.load(pairs.query_documents + batch * pairs.n_q + rows, mask=rows < pairs.n_q, other=0)
        same = document == tl.load(pairs.key_documents + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(same, scores, float("-inf"))
    return scores, tangent


@triton.jit
def _find_allowed(tile, offsets, pairs):
    """Return which pairs of a tile have a key and an offset that is allowed, TILE."""
    columns = tile.columns
    if pairs.query_positions is None:
        # Two bounds for each row, in units of positions after the tile's first key: in a loop over keys, the keys'
        # positions are always the same.
        key = (columns - tile.first_key) * pairs.key_stride  # columns.shape
        first_offset = pairs.start + tile.first_key * pairs.key_stride - tile.rows * pairs.query_stride  # rows.shape
        last = (pairs.n_k - 1 - tile.first_key) * pairs.key_stride
        if pairs.max_offset is not None:
            last = tl.minimum(pairs.max_offset - first_offset, last)  # rows.shape
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
def _bound(x, limit):
    """Bound numbers on both sides. NaN stays NaN, which hardware's minimum and maximum otherwise drop."""
    x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)


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
def compute_weights(scores, shift, log_sum, terms):
    """Return the weights of scores, exp2(scores - shift - log_sum); see ``Norm``."""
    if terms.products.is_scaled_last:
        return tl.exp2(tl.fma(scores, terms.products.log2_scale, -shift) - log_sum)
    else:
        # The order matters: the difference of large numbers is exact, so the small number subtracted after is not lost.
        return tl.exp2((scores - shift) - log_sum)


@triton.jit
def dropout_keep_mask(tile, pairs):
    """Return which weights of a tile survive dropout, TILE, like ``keep_mask`` in ``dropout.py``."""
    seeds = load_numbers(pairs.dropout_seeds, pairs.n_q, pairs, tile.batch_head, tile.rows, 0)  # rows.shape
    mixed = seeds.to(tl.uint32, bitcast=True)
    mixed = mixed + tile.columns.to(tl.uint32) * 0x9E3779B9  # TILE
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return mixed >= tl.cast(pairs.dropout_threshold, tl.uint32)
