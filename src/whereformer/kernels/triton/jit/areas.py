"""The areas of tiles: which part of the offset tables each tile in a row (or column) of tiles reads.

Tables are constant beyond their ends, so the tiles fall into areas. LEFT and RIGHT of every table, a table is one
number per head (or row). INSIDE, it is read pair by pair. ANY makes no assumption: offsets are clamped, and keys beyond
the end and offsets that are not allowed are masked. With affine positions the areas follow from the tile's place and
each has its own loop; with explicit positions every tile is ANY.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

# In the order in which a row of tiles has them. A row begins with ANY too if offsets may be too small.
LEFT, INSIDE, RIGHT, ANY = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _blocks_up_to(limit, stride, BLOCK: tl.constexpr):
    """Return the number of leading blocks with ``index * stride <= limit`` for all their indices."""
    return (tl.maximum(limit, -1) // stride + 1) // BLOCK


@triton.jit
def _first_block_from(limit, stride, BLOCK: tl.constexpr):
    """Return the first block with ``index * stride >= limit`` for all its indices."""
    return (tl.maximum(limit, 0) + stride * BLOCK - 1) // (stride * BLOCK)


@triton.jit
def _between(block, first, last):
    return tl.minimum(tl.maximum(block, first), last)


@triton.jit
def _in_documents(firsts, lasts, batch, first, n, start, end, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr):
    """Shorten the blocks from ``start`` to ``end`` to those that share a document with the rows from ``first`` on."""
    if firsts is not None:
        index = first + tl.arange(0, BLOCK)
        at = tl.cast(batch, tl.int64) * n + index
        earliest = tl.min(tl.load(firsts + at, mask=index < n, other=2**30), 0)
        latest = tl.max(tl.load(lasts + at, mask=index < n, other=-1), 0)
        end = tl.minimum(end, (latest + BLOCK_OTHER) // BLOCK_OTHER)
        start = tl.minimum(tl.maximum(start, earliest // BLOCK_OTHER), end)
    return start, end


@triton.jit
def key_areas(terms, pairs, batch, first_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the key blocks at which a query block changes area, and the first and the last of those in a table.

    The areas begin at (start, any_end, left_end, inside_end, right_end, end). ANY is between the first two; LEFT,
    INSIDE, RIGHT and ANY follow.
    """
    end = tl.cdiv(pairs.n_k, BLOCK_N)
    if pairs.key_end is not None:
        end = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK_N))
    start = end * 0
    if pairs.query_positions is None:
        # A key block's smallest and largest offset: its first key from the last row, its last key from the first row.
        low = pairs.start - (first_row + BLOCK_M - 1) * pairs.query_stride
        high = pairs.start - first_row * pairs.query_stride
        full = pairs.n_k // BLOCK_N
        any_end = end * 0
        if pairs.max_offset is not None:
            end = tl.minimum(end, _first_block_from(pairs.max_offset + 1 - low, pairs.key_stride, BLOCK_N))
            full = tl.minimum(full, _blocks_up_to(pairs.max_offset - high, pairs.key_stride, BLOCK_N))
        if pairs.min_offset is not None:
            start = tl.minimum(_blocks_up_to(pairs.min_offset - 1 - high, pairs.key_stride, BLOCK_N), end)
            any_end = _first_block_from(pairs.min_offset - low, pairs.key_stride, BLOCK_N)
        start, end = _in_documents(
            pairs.first_keys, pairs.last_keys, batch, first_row, pairs.n_q, start, end, BLOCK_M, BLOCK_N
        )
        any_end = _between(any_end, start, end)
        full = _between(full, any_end, end)
        left_end, inside_end, band_start, band_end = any_end, full, start, end
        if terms.span.first is not None:
            before = _blocks_up_to(terms.span.first - high, pairs.key_stride, BLOCK_N)
            after = _first_block_from(terms.span.last - low, pairs.key_stride, BLOCK_N)
            left_end = _between(before, any_end, full)
            inside_end = _between(after, left_end, full)
            band_start = _between(before, start, end)
            band_end = _between(after, band_start, end)
        return (start, any_end, left_end, inside_end, full, end), (band_start, band_end)
    else:
        start, end = _in_documents(
            pairs.first_keys, pairs.last_keys, batch, first_row, pairs.n_q, start, end, BLOCK_M, BLOCK_N
        )
        return (start, start, start, start, start, end), (start, end)


@triton.jit
def query_areas(terms, pairs, batch, first_key, all_any, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the query blocks at which a key block changes area; if ``all_any``, all are ANY.

    This is :func:`key_areas` with rows and columns exchanged: the areas begin at (start, any_end, right_end,
    inside_end, left_end, end), first ANY, then RIGHT, INSIDE, LEFT and ANY.
    """
    end = tl.cdiv(pairs.n_q, BLOCK_M)
    if pairs.key_end is not None:
        end = tl.where(first_key < tl.load(pairs.key_end + batch), end, 0)
    start = end * 0
    if pairs.query_positions is None:
        low = pairs.start + first_key * pairs.key_stride
        high = low + (BLOCK_N - 1) * pairs.key_stride
        any_end = end * 0
        if pairs.min_offset is not None:
            end = tl.minimum(end, _first_block_from(high + 1 - pairs.min_offset, pairs.query_stride, BLOCK_M))
        if pairs.max_offset is not None:
            start = tl.minimum(_blocks_up_to(low - pairs.max_offset - 1, pairs.query_stride, BLOCK_M), end)
            any_end = _first_block_from(high - pairs.max_offset, pairs.query_stride, BLOCK_M)
        start, end = _in_documents(
            pairs.first_queries, pairs.last_queries, batch, first_key, pairs.n_k, start, end, BLOCK_N, BLOCK_M
        )
        any_end = tl.where(all_any, end, _between(any_end, start, end))
        left_end = end
        if pairs.min_offset is not None:
            left_end = _between(_blocks_up_to(low - pairs.min_offset, pairs.query_stride, BLOCK_M), any_end, end)
        right_end, inside_end = any_end, left_end
        if terms.span.first is not None:
            right_end = _blocks_up_to(low - terms.span.last, pairs.query_stride, BLOCK_M)
            right_end = _between(right_end, any_end, left_end)
            inside_end = _first_block_from(high - terms.span.first, pairs.query_stride, BLOCK_M)
            inside_end = _between(inside_end, right_end, left_end)
        return start, any_end, right_end, inside_end, left_end, end
    else:
        start, end = _in_documents(
            pairs.first_queries, pairs.last_queries, batch, first_key, pairs.n_k, start, end, BLOCK_N, BLOCK_M
        )
        return start, end, end, end, end, end
