"""The scores of a tile, in units of log2, and the weights that dropout keeps."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .areas import ANY, LEFT, RIGHT
from .tiles import load_numbers, row_index

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2.3586e38)  # times log2(e), this is still a finite float32


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
def from_vector_table(table, tile, offsets, pairs, AREA: tl.constexpr):
    """Return what the products with a table of vectors give for each pair of a tile."""
    at = table.products + row_index(pairs, tile.place, tile.rows) * table.length
    if AREA == RIGHT:
        at += table.length - 1
    elif AREA != LEFT:
        at = at + _clamped(offsets - table.first, table.length)
    return tl.load(at, mask=tile.rows < pairs.n_q, other=0.0)


@triton.jit
def _from_bias(bias, tile, offsets, pairs, AREA: tl.constexpr):
    """Return what the table of numbers adds to each pair of a tile; one number if the tile is LEFT or RIGHT."""
    table = bias.log2 + tile.place.head * bias.row
    if AREA == LEFT:
        return tl.load(table)
    elif AREA == RIGHT:
        return tl.load(table + bias.row - 1)
    elif AREA == ANY:
        return tl.load(table + _clamped(offsets - bias.shift, bias.row))
    else:
        # Use one address for the tile and small distances from it, which the compiler folds into the loads.
        corner = pairs.start + tile.first_key * pairs.key_stride - tile.first_row * pairs.query_stride - bias.shift
        at = table + corner + (tile.columns - tile.first_key) * pairs.key_stride
        return tl.load(at - (tile.rows - tile.first_row) * pairs.query_stride)


@triton.jit
def _from_dense(dense, tile, pairs):
    """Load dense scores, in float32."""
    rows, columns = tile.rows, tile.columns
    at = (
        dense.data + tl.cast(tile.place.batch, tl.int64) * dense.batch + tl.cast(tile.place.head, tl.int64) * dense.head
    )
    at = at + rows.to(tl.int64) * dense.row + columns.to(tl.int64) * dense.column
    added = tl.load(at, mask=(rows < pairs.n_q) & (columns < pairs.n_k), other=0.0).to(tl.float32)
    # The lowest finite number must stay finite: only -inf forbids a pair.
    return tl.where(added == float("-inf"), added, tl.maximum(added, LOWEST))


@triton.jit
def scores_of(left, right, tile, terms, pairs, AREA: tl.constexpr):
    """Return the scores of a tile, -inf where a pair may not attend; ``left`` and ``right`` are the sides of its axes.

    The compiler may round a product and a sum once or twice. Beside a large number this gives different scores, but
    forward and backward must compute the same ones; so products that are added to large numbers are explicit fused
    multiply-adds.
    """
    rows, columns = tile.rows, tile.columns
    SCALED_WITH_BIAS: tl.constexpr = terms.bias.log2 is not None and not left.factors.type.is_block()
    if left.vectors.type.is_block():
        scores = tl.dot(left.vectors, tl.trans(right.vectors), input_precision="ieee")
        if not SCALED_WITH_BIAS:
            scores *= terms.scale.log2
    else:
        scores = tl.zeros_like((rows + columns).to(tl.float32))
    if left.factors.type.is_block():
        factors = tl.dot(left.factors, tl.trans(right.factors), input_precision="ieee")
        scores = tl.fma(factors, LOG2E, scores)
    offsets = offsets_of(tile, pairs)
    # No key has a negative index, so this always holds. Without the condition, Triton's pipeliner would stage these
    # loads through shared memory, which wastes room and time on numbers that are gathered one by one.
    if tile.first_key >= 0:
        if terms.bias.log2 is not None:
            bias = _from_bias(terms.bias, tile, offsets, pairs, AREA)
            if SCALED_WITH_BIAS:
                scores = tl.fma(scores, terms.scale.log2, bias)
            else:
                scores += bias
        if terms.key_table.products is not None:
            scores += from_vector_table(terms.key_table, tile, offsets, pairs, AREA)
        if terms.dense.data is not None:
            scores = tl.fma(_from_dense(terms.dense, tile, pairs), LOG2E, scores)
    if AREA >= ANY:
        allowed = columns < pairs.n_k
        if pairs.causal:
            allowed = allowed & (offsets <= 0)
        scores = tl.where(allowed, scores, float("-inf"))
    batch = tile.place.batch
    if pairs.key_mask is not None:
        may = tl.load(pairs.key_mask + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(may != 0, scores, float("-inf"))
    if pairs.query_documents is not None:
        document = tl.load(pairs.query_documents + batch * pairs.n_q + rows, mask=rows < pairs.n_q, other=0)
        same = document == tl.load(pairs.key_documents + batch * pairs.n_k + columns, mask=columns < pairs.n_k, other=0)
        scores = tl.where(same, scores, float("-inf"))
    return scores


@triton.jit
def kept(tile, pairs):
    """Return which weights of a tile survive dropout, like ``keep_mask`` in ``dropout.py``."""
    mixed = load_numbers(pairs.dropout_seeds, pairs, tile.place, tile.rows, 0).to(tl.uint32, bitcast=True)
    mixed = mixed + tile.columns.to(tl.uint32) * 0x9E3779B9
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return mixed >= tl.cast(pairs.dropout_threshold, tl.uint32)
