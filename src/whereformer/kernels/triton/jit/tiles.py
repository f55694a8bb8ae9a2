"""Loads and stores of rows, and the parts of a call that a program and a tile work on."""

# mypy: ignore-errors
# Kernels are a separate language that only looks like Python.

from typing import NamedTuple

import triton
import triton.language as tl


class BatchHead(NamedTuple):
    """The batch row and the head that a program works on."""

    batch: tl.tensor
    head: tl.tensor


class ScoreTile(NamedTuple):
    """The queries and keys of a tile; ``rows`` and ``columns`` broadcast to TILE."""

    batch_head: BatchHead
    first_row: tl.tensor
    first_key: tl.tensor
    rows: tl.tensor  # (BLOCK_M, 1), or (1, BLOCK_M) if tiles are transposed
    columns: tl.tensor  # (1, BLOCK_N), or (BLOCK_N, 1)


class Side(NamedTuple):
    """The rows of queries, or of keys, that make scores; 0 in place of rows that a call does not have."""

    vectors: tl.tensor  # (BLOCK, head_dim)
    factors: tl.tensor  # (BLOCK, rank)


class QueryBlock(NamedTuple):
    """A block of queries, with everything that is loaded once for it."""

    batch_head: BatchHead
    first_row: tl.tensor
    rows: tl.tensor  # (BLOCK_M, 1)
    side: Side
    d_out: tl.tensor | None  # (BLOCK_M, value_dim), and the next field: None in the forward
    row_state: tuple[tl.tensor, ...] | None  # a RowState


@triton.jit
def find_batch_head(program, blocks, pairs):
    """Return the batch row and head of a program; each head has ``blocks`` programs."""
    return BatchHead(program // blocks // pairs.heads, program // blocks % pairs.heads)


@triton.jit
def _row_pointers(matrix, batch_head, first_row, BLOCK: tl.constexpr):
    head = tl.cast(batch_head.head // matrix.group_size, tl.int64)
    base = matrix.data + tl.cast(batch_head.batch, tl.int64) * matrix.batch_stride + head * matrix.head_stride
    base += tl.cast(first_row, tl.int64) * matrix.row_stride
    rows = tl.arange(0, BLOCK)[:, None] * matrix.row_stride  # (BLOCK, 1)
    return base + rows + tl.arange(0, matrix.padded_width)[None, :]  # (BLOCK, width)


@triton.jit
def _row_mask(matrix, first_row, n, BLOCK: tl.constexpr):
    mask = tl.arange(0, BLOCK)[:, None] < n - first_row  # (BLOCK, 1)
    if matrix.width != matrix.padded_width:
        mask = mask & (tl.arange(0, matrix.padded_width)[None, :] < matrix.width)  # (BLOCK, width)
    return mask


@triton.jit
def load(matrix, batch_head, first_row, n, BLOCK: tl.constexpr):
    """Load rows from ``first_row`` on, (BLOCK, width), with zeros after row n and after the width; 0 without data."""
    if matrix.data is None:
        return tl.full([], 0.0, tl.float32)
    else:
        pointers = _row_pointers(matrix, batch_head, first_row, BLOCK)
        return tl.load(pointers, mask=_row_mask(matrix, first_row, n, BLOCK), other=0.0)  # (BLOCK, width)


@triton.jit
def store(matrix, tile, batch_head, first_row, n, BLOCK: tl.constexpr):
    """Store rows, (BLOCK, width), from row ``first_row`` on; do nothing without data."""
    if matrix.data is not None:
        pointers = _row_pointers(matrix, batch_head, first_row, BLOCK)
        tl.store(pointers, tile.to(matrix.data.dtype.element_ty), mask=_row_mask(matrix, first_row, n, BLOCK))


@triton.jit
def load_column(matrix, batch_head, rows, n, COLUMN: tl.constexpr):
    """Load one column of some rows, in their shape, with zeros after row n."""
    head = tl.cast(batch_head.head // matrix.group_size, tl.int64)
    base = matrix.data + tl.cast(batch_head.batch, tl.int64) * matrix.batch_stride + head * matrix.head_stride + COLUMN
    return tl.load(base + rows.to(tl.int64) * matrix.row_stride, mask=rows < n, other=0.0)  # rows.shape


@triton.jit
def load_side(vectors, factors, batch_head, first_row, n, BLOCK: tl.constexpr):
    """Load the side of a block of n queries or keys."""
    return Side(load(vectors, batch_head, first_row, n, BLOCK), load(factors, batch_head, first_row, n, BLOCK))


@triton.jit
def convert_to_product_layout(numbers):
    """Return a loaded tile unchanged, but in the layout of the product to which it is added.

    A load has its own layout, which spreads a row over a warp. Without this gather, which the compiler does not look
    through, it would compute everything that follows in both layouts.
    """
    SIZE: tl.constexpr = numbers.numel
    flat = tl.gather(tl.reshape(numbers, [SIZE]), tl.arange(0, SIZE), 0)  # (SIZE,)
    return tl.reshape(flat, numbers.shape)


@triton.jit
def head_index(pairs, batch_head):
    """Return the index of a query head in a (batch, heads) tensor."""
    return tl.cast(batch_head.batch, tl.int64) * pairs.heads + batch_head.head


@triton.jit
def load_numbers(data, head_stride, pairs, batch_head, rows, default):
    """Load one number per row of (batch, heads, n_q), in the shape of ``rows``; ``default`` after the last row."""
    pointers = data + head_index(pairs, batch_head) * head_stride + rows
    return tl.load(pointers, mask=rows < pairs.n_q, other=default)  # rows.shape
