"""The areas of tiles: which part of the offset tables each tile in a row (or column) of tiles reads.

Tables are constant beyond their ends, so the tiles fall into areas. LEFT and RIGHT of every table, a table is one
number per head (or row). INSIDE, it is read pair by pair. ANY makes no assumption: offsets are clamped, and keys beyond
the end and future keys are masked. With affine positions the areas follow from the tile's place and each has its own
loop; with explicit positions every tile is ANY. EDGE is INSIDE, but masked like ANY.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

# In the order in which a row of tiles has them.
LEFT, INSIDE, RIGHT, ANY = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EDGE = tl.constexpr(3)


@triton.jit
def _blocks_up_to(limit, stride, BLOCK: tl.constexpr):
    """Return the number of leading blocks with ``index * stride <= limit`` for all their indices."""
    return (tl.maximum(limit, -1) // stride + 1) // BLOCK


@triton.jit
def _first_block_from(limit, stride, BLOCK: tl.constexpr):
    """Return the first block with ``index * stride >= limit`` for all its indices."""
    return (tl.maximum(limit, 0) + stride * BLOCK - 1) // (stride * BLOCK)


@triton.jit
def key_areas(terms, pairs, batch, first_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the key blocks at which a query block changes area.

    These are (start, left_end, inside_end, right_end, end) and band_end. LEFT is between the first two; INSIDE, RIGHT
    and ANY follow. At band_end RIGHT would begin if there were no ANY.
    """
    end = tl.cdiv(pairs.n_k, BLOCK_N)
    if pairs.query_positions is None:
        # A key block's smallest and largest offset: its first key from the last row, its last key from the first row.
        low = pairs.start - (first_row + BLOCK_M - 1) * pairs.query_stride
        high = pairs.start - first_row * pairs.query_stride
        full = pairs.n_k // BLOCK_N
        if pairs.causal:
            end = tl.minimum(end, _first_block_from(1 - low, pairs.key_stride, BLOCK_N))
            full = tl.minimum(full, _blocks_up_to(-high, pairs.key_stride, BLOCK_N))
        if pairs.key_end is not None:
            end = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK_N))
        full = tl.minimum(full, end)
        left_end = full * 0
        inside_end = full
        band_end = end
        if terms.span.first is not None:
            left_end = tl.minimum(_blocks_up_to(terms.span.first - high, pairs.key_stride, BLOCK_N), full)
            band_end = _first_block_from(terms.span.last - low, pairs.key_stride, BLOCK_N)
            band_end = tl.minimum(tl.maximum(band_end, left_end), end)
            inside_end = tl.minimum(band_end, full)
        return (left_end * 0, left_end, inside_end, full, end), band_end
    else:
        if pairs.key_end is not None:
            end = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK_N))
        return (end * 0, end * 0, end * 0, end * 0, end), end


@triton.jit
def query_areas(terms, pairs, batch, first_key, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the query blocks at which a key block changes area: (start, any_end, right_end, inside_end, end).

    This is :func:`key_areas` with rows and columns exchanged: ANY comes first, then RIGHT, INSIDE, LEFT.
    """
    end = tl.cdiv(pairs.n_q, BLOCK_M)
    if pairs.key_end is not None:
        end = tl.where(first_key < tl.load(pairs.key_end + batch), end, 0)
    if pairs.query_positions is None:
        low = pairs.start + first_key * pairs.key_stride
        high = low + (BLOCK_N - 1) * pairs.key_stride
        start = end * 0
        any_end = end * 0
        if pairs.causal:
            start = tl.minimum(_blocks_up_to(low - 1, pairs.query_stride, BLOCK_M), end)
            any_end = tl.minimum(tl.maximum(_first_block_from(high, pairs.query_stride, BLOCK_M), start), end)
        right_end = any_end
        inside_end = end
        if terms.span.first is not None:
            right_end = _blocks_up_to(low - terms.span.last, pairs.query_stride, BLOCK_M)
            right_end = tl.minimum(tl.maximum(right_end, any_end), end)
            inside_end = _first_block_from(high - terms.span.first, pairs.query_stride, BLOCK_M)
            inside_end = tl.minimum(tl.maximum(inside_end, right_end), end)
        return start, any_end, right_end, inside_end, end
    else:
        return end * 0, end, end, end, end
