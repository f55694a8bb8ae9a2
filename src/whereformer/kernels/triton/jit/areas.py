"""The areas of tiles: which part of the offset tables each tile in a row (or column) of tiles reads.

Tables are constant beyond their ends, so the tiles fall into areas. LEFT and RIGHT of every table, a table is one
number per head (or row). INSIDE, it is read pair by pair. ANY makes no assumption: offsets are clamped, and keys after
the last one and offsets that are not allowed are masked. With affine positions the areas follow from the tile's
position and each has its own loop; with explicit positions every tile is ANY.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

# In their order in a row of tiles. A row begins with ANY too if offsets may be too small.
LEFT, INSIDE, RIGHT, ANY = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _count_blocks_up_to(limit, stride, BLOCK: tl.constexpr):
    """Return the number of leading blocks with ``index * stride <= limit`` for all their indices."""
    return (tl.maximum(limit, -1) // stride + 1) // BLOCK


@triton.jit
def _find_first_block_from(limit, stride, BLOCK: tl.constexpr):
    """Return the first block with ``index * stride >= limit`` for all its indices."""
    return (tl.maximum(limit, 0) + stride * BLOCK - 1) // (stride * BLOCK)


@triton.jit
def clamp(numbers, first, last):
    """Return numbers, or the first or the last where they are beyond these."""
    return tl.minimum(tl.maximum(numbers, first), last)


@triton.jit
def limit_to_documents(firsts, lasts, batch, first, n, end, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr):
    """Return the first and the last of ``end`` blocks that share a document with the rows from ``first`` on."""
    start = end * 0
    if firsts is not None:
        index = first + tl.arange(0, BLOCK)  # (BLOCK,)
        in_batch = tl.cast(batch, tl.int64) * n + index  # (BLOCK,)
        earliest = tl.min(tl.load(firsts + in_batch, mask=index < n, other=2**30), 0)
        latest = tl.max(tl.load(lasts + in_batch, mask=index < n, other=-1), 0)
        end = tl.minimum(end, (latest + BLOCK_OTHER) // BLOCK_OTHER)
        start = tl.minimum(tl.maximum(start, earliest // BLOCK_OTHER), end)
    return start, end


@triton.jit
def _find_areas(low, high, stride, min_offset, max_offset, first, last, start, end, full, all_any, BLOCK: tl.constexpr):
    """Return the blocks from ``start`` to ``end`` at which a row of tiles changes area, and the first and the last in a
    table.

    The areas begin at (start, any_end, before, after, full, end). ANY is between the first two. Beyond the table's
    first end, INSIDE, beyond its last end, and ANY follow.

    Args:
        low, high: the smallest and the largest offset of the row and the first index, which grow with ``stride``.
        min_offset, max_offset: the offsets that are allowed; None without a limit.
        first, last: the offsets at which tables end; None if no pair reads beyond.
        full: the number of blocks without an index that must be masked; None if none must.
    """
    any_end = end * 0
    has_masked = full is not None or max_offset is not None
    if full is None:
        full = end
    if max_offset is not None:
        end = tl.minimum(end, _find_first_block_from(max_offset + 1 - low, stride, BLOCK))
        full = tl.minimum(full, _count_blocks_up_to(max_offset - high, stride, BLOCK))
    if min_offset is not None:
        start = tl.maximum(start, _count_blocks_up_to(min_offset - 1 - high, stride, BLOCK))
        any_end = _find_first_block_from(min_offset - low, stride, BLOCK)
    any_end = tl.where(all_any, end, clamp(any_end, start, end))
    if has_masked:
        full = clamp(full, any_end, end)
    before, after, band_start, band_end = any_end, full, start, end
    if first is not None:
        before = _count_blocks_up_to(first - high, stride, BLOCK)
        after = _find_first_block_from(last - low, stride, BLOCK)
        band_start = clamp(before, start, end)
        band_end = clamp(after, band_start, end)
        before = clamp(before, any_end, full)
        after = clamp(after, before, full)
    return (start, any_end, before, after, full, end), (band_start, band_end)


@triton.jit
def find_key_areas(terms, pairs, batch, first_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the key blocks at which a query block changes area, and the first and the last key block in a table; see
    :func:`_find_areas`.

    ANY is between the first two; LEFT, INSIDE, RIGHT and ANY follow.
    """
    end = tl.cdiv(pairs.n_k, BLOCK_N)
    if pairs.key_end is not None:
        end = tl.minimum(end, tl.cdiv(tl.load(pairs.key_end + batch), BLOCK_N))
    firsts, lasts = pairs.first_keys, pairs.last_keys
    start, end = limit_to_documents(firsts, lasts, batch, first_row, pairs.n_q, end, BLOCK_M, BLOCK_N)
    if pairs.query_positions is None:
        low = pairs.start - (first_row + BLOCK_M - 1) * pairs.query_stride
        high = pairs.start - first_row * pairs.query_stride
        min_offset, max_offset, first, last = pairs.min_offset, pairs.max_offset, terms.span.first, terms.span.last
        full, stride = pairs.n_k // BLOCK_N, pairs.key_stride
        return _find_areas(low, high, stride, min_offset, max_offset, first, last, start, end, full, False, BLOCK_N)
    else:
        return (start, start, start, start, start, end), (start, end)


@triton.jit
def find_query_areas(terms, pairs, batch, first_key, all_any, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the query blocks at which a key block changes area; if ``all_any``, all are ANY.

    Offsets fall with the queries, so first comes ANY, then RIGHT, INSIDE, LEFT and ANY.
    """
    end = tl.cdiv(pairs.n_q, BLOCK_M)
    if pairs.key_end is not None:
        end = tl.where(first_key < tl.load(pairs.key_end + batch), end, 0)
    firsts, lasts = pairs.first_queries, pairs.last_queries
    start, end = limit_to_documents(firsts, lasts, batch, first_key, pairs.n_k, end, BLOCK_N, BLOCK_M)
    if pairs.query_positions is None:
        # With the other sign, they grow.
        high = -pairs.start - first_key * pairs.key_stride
        low = high - (BLOCK_N - 1) * pairs.key_stride
        min_offset = None if pairs.max_offset is None else -pairs.max_offset
        max_offset = None if pairs.min_offset is None else -pairs.min_offset
        first = None if terms.span.last is None else -terms.span.last
        last = None if terms.span.first is None else -terms.span.first
        bounds, _ = _find_areas(
            low, high, pairs.query_stride, min_offset, max_offset, first, last, start, end, None, all_any, BLOCK_M
        )
        return bounds
    else:
        return start, start, start, start, start, end
