"""Loads and stores of rows, and the place of a program and of a tile."""

# mypy: ignore-errors
# Kernels are a language of their own that only looks like Python.

from typing import Any, NamedTuple

import triton
import triton.language as tl


class BatchHead(NamedTuple):
    """The batch row and the head that a program works on."""

    batch: Any
    head: Any


class ScoreTile(NamedTuple):
    """The queries and keys of a tile; ``rows`` and ``columns`` broadcast, so that tiles may be transposed."""

    place: BatchHead
    first_row: Any
    first_key: Any
    rows: Any
    columns: Any


class Side(NamedTuple):
    """The rows of queries, or of keys, that make scores; 0 for what a call does not have."""

    vectors: Any
    factors: Any


class QueryBlock(NamedTuple):
    """A block of queries, with everything that is loaded once for it."""

    place: BatchHead
    first_row: Any
    rows: Any
    side: Side
    d_out: Any  # this and the next in the backward only
    row_state: Any


@triton.jit
def place_of(program, blocks, pairs):
    """Return the batch row and head of a program; each head has ``blocks`` programs."""
    return BatchHead(program // blocks // pairs.heads, program // blocks % pairs.heads)


@triton.jit
def _pointers(matrix, place, first, BLOCK: tl.constexpr):
    head = tl.cast(place.head // matrix.shared, tl.int64)
    base = matrix.data + tl.cast(place.batch, tl.int64) * matrix.batch + head * matrix.head
    base += tl.cast(first, tl.int64) * matrix.row
    return base + tl.arange(0, BLOCK)[:, None] * matrix.row + tl.arange(0, matrix.padded)[None, :]


@triton.jit
def _mask(matrix, first, n, BLOCK: tl.constexpr):
    mask = tl.arange(0, BLOCK)[:, None] < n - first
    if matrix.width != matrix.padded:
        mask = mask & (tl.arange(0, matrix.padded)[None, :] < matrix.width)
    return mask


@triton.jit
def load(matrix, place, first, n, BLOCK: tl.constexpr):
    """Load rows from ``first`` on, (BLOCK, padded), with zeros beyond row n and beyond the width; 0 without data."""
    if matrix.data is None:
        return tl.full([], 0.0, tl.float32)
    else:
        pointers = _pointers(matrix, place, first, BLOCK)
        return tl.load(pointers, mask=_mask(matrix, first, n, BLOCK), other=0.0)


@triton.jit
def store(matrix, tile, place, first, n, BLOCK: tl.constexpr):
    """Store rows (BLOCK, padded) from row ``first`` on; do nothing without data."""
    if matrix.data is not None:
        pointers = _pointers(matrix, place, first, BLOCK)
        tl.store(pointers, tile.to(matrix.data.dtype.element_ty), mask=_mask(matrix, first, n, BLOCK))


@triton.jit
def load_column(matrix, place, rows, n, COLUMN: tl.constexpr):
    """Load one column of some rows, in their shape, with zeros beyond row n."""
    head = tl.cast(place.head // matrix.shared, tl.int64)
    base = matrix.data + tl.cast(place.batch, tl.int64) * matrix.batch + head * matrix.head + COLUMN
    return tl.load(base + rows.to(tl.int64) * matrix.row, mask=rows < n, other=0.0)


@triton.jit
def load_side(vectors, factors, place, first, n, BLOCK: tl.constexpr):
    """Load the side of a block of n queries or keys."""
    return Side(load(vectors, place, first, n, BLOCK), load(factors, place, first, n, BLOCK))


@triton.jit
def beside_products(numbers):
    """Return a loaded tile unchanged, but in the layout of the product to which it is added.

    A load has its own layout, in which a row is spread over a warp. Without this gather, which the compiler does not
    look through, it would compute everything that follows in both layouts.
    """
    SIZE: tl.constexpr = numbers.numel
    flat = tl.gather(tl.reshape(numbers, [SIZE]), tl.arange(0, SIZE), 0)
    return tl.reshape(flat, numbers.shape)


@triton.jit
def head_index(pairs, place):
    """Return the index of a head in a (batch, heads) tensor, with as many heads as queries have."""
    return tl.cast(place.batch, tl.int64) * pairs.heads + place.head


@triton.jit
def load_numbers(data, head, pairs, place, rows, other):
    """Load one number per row, where heads are ``head`` numbers apart; ``other`` for rows beyond the last."""
    return tl.load(data + head_index(pairs, place) * head + rows, mask=rows < pairs.n_q, other=other)
