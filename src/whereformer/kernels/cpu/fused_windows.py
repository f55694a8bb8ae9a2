"""Torch's own CPU kernels for a window without terms: blocks of queries, with the keys that they reach, as batch items.

Neighboring blocks share keys. They are views of the same memory, and the gradients of keys are sums over blocks. Blocks
go to the kernels a few at a time, so that what goes in and comes out stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import tuning
from ..problem import GRADIENTS, Problem
from ..torch_private import cpu_attention, cpu_attention_backward
from ..tracing import are_numbers
from .fused_bias import new_norm
from .pieces import Piece
from .tables import Grid, GridBias, layout
from .tiles import chunks
from .windows import tile_scores, unroll
from .workspace import Workspace

_DTYPES = torch.float32, torch.float64, torch.bfloat16


def takes(problem: Problem, device: torch.device) -> bool:
    """Whether this module computes a problem."""
    query, value = problem.query, problem.value
    inputs = {name for name in GRADIENTS if getattr(problem, name) is not None}
    sizes = (problem.n_q, problem.n_k, *problem.affine, problem.min_offset or 0, problem.max_offset or 0)
    if (
        not problem.limits_offsets
        or device.type != "cpu"
        or query is None
        or inputs != {"query", "key", "value"}
        or value.dtype not in _DTYPES
        or query.shape[3] != value.shape[3]
        or problem.heads != value.shape[1]
        or problem.seed is not None
        or problem.softcap is not None
        or problem.wants_lse
        or problem.query_positions is not None
        or problem.key_positions is not None
        or not are_numbers(*sizes)
        or problem.has_gaps()
    ):
        return False
    piece = Piece(range(1), range(problem.n_q), range(problem.n_k), *problem.positions())
    grid = layout(piece.query_positions, piece.key_positions, device)
    if not isinstance(grid, Grid) or len(unroll(problem, piece)) == 1:
        return False
    # The kernels' softmax needs a key in every row. If the first and the last query have keys, then so have all.
    reach = grid.reach(problem.min_offset, problem.max_offset)
    return all(grid.keys_of(range(row, row + 1), reach) for row in (0, problem.n_q - 1))


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log of the rows' sums of exponentials, (batch, heads, n_q), and no ``LogSums``."""
    output, norm = problem.new_output(), new_norm(problem)
    workspace = Workspace(output.device)
    for blocks in _blocks_of(problem, workspace):
        query, key, value = blocks.content()
        found, sums = cpu_attention(query, key, value, attn_mask=blocks.mask, scale=problem.scale)
        blocks.of_queries(output).copy_(found)
        blocks.of_queries(norm).copy_(sums)
    workspace.close()
    return output, norm, problem.new_lse()


def backward(
    problem: Problem, output_gradient: Tensor, output: Tensor, norm: Tensor, needed: Sequence[bool]
) -> list[Tensor]:
    """Return the needed gradients of query, key and value."""
    gradients = problem.new_gradients(needed)
    names = [name for name, need in zip(GRADIENTS, needed, strict=True) if need]
    into = dict(zip(names, gradients, strict=True))
    workspace = Workspace(output.device)
    for name in ("key", "value"):
        if name in into and into[name].dtype != problem.dtype:
            into[name] = workspace.take(tuple(into[name].shape), problem.dtype)
        if name in into:
            into[name].zero_()
    for blocks in _blocks_of(problem, workspace):
        found = cpu_attention_backward(
            blocks.read(output_gradient, blocks.queries),
            *blocks.content(),
            blocks.read(output, blocks.queries),
            blocks.of_queries(norm),
            attn_mask=blocks.mask,
            scale=problem.scale,
        )
        if "query" in into:
            blocks.of_queries(into["query"]).copy_(found[0])
        for name, gradient in zip(("key", "value"), found[1:], strict=True):
            if name in into:
                blocks.add(gradient, into[name])
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not into[name]:
            gradient.copy_(into[name])
    workspace.close()
    return gradients


def _blocks_of(problem: Problem, workspace: Workspace) -> Iterator[_Blocks]:
    """Yield all blocks, some at a time. What they take from the workspace is free again when the next ones begin."""
    masks = dict[tuple[int, int, int], Tensor]()
    for piece in (part for whole in problem.pieces() for part in unroll(problem, whole)):
        shape = len(piece.queries), len(piece.keys), piece.keys.start - piece.queries.start
        if shape not in masks:
            masks[shape] = _mask(problem, piece)
        size = problem.heads * len(piece.queries) * len(piece.keys)
        for item in piece.batch:
            for some in chunks(range(piece.repeats), max(1, 2 * tile_scores(problem.value.device) // size)):
                with workspace.scope():
                    yield _Blocks(problem, piece, item, some, masks[shape], workspace)


def _mask(problem: Problem, piece: Piece) -> Tensor:
    """Return what is added to a block's scores, (1, 1, queries, keys): 0, or -inf beyond the window."""
    grid = layout(piece.query_positions, piece.key_positions, problem.value.device)
    assert isinstance(grid, Grid)
    nothing = problem.value.new_zeros(1, 1, dtype=problem.dtype)
    return GridBias(grid, nothing, 0, grid.reach(problem.min_offset, problem.max_offset)).whole().unsqueeze(0)


class _Blocks:
    """Some repetitions of a piece, of one item of the batch; a tensor's part is (repetitions, heads, rows, ...)."""

    def __init__(
        self, problem: Problem, piece: Piece, item: int, some: range, mask: Tensor, workspace: Workspace
    ) -> None:
        self.problem, self.item, self.workspace = problem, item, workspace
        self.count, self.shift = len(some), len(piece.queries)
        first = self.shift * some.start
        self.queries, self.keys = (range(at.start + first, at.stop + first) for at in (piece.queries, piece.keys))
        self.mask = mask.expand(self.count, -1, -1, -1)

    def content(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the blocks' queries, keys and values."""
        assert self.problem.query is not None
        assert self.problem.key is not None
        query = self.read(self.problem.query, self.queries)
        return query, self.read(self.problem.key, self.keys), self.read(self.problem.value, self.keys)

    def read(self, tensor: Tensor, rows: range) -> Tensor:
        """Return the blocks' rows of (batch, heads, n, dim) as the kernels take them; ``rows`` are of the first."""
        dtype = self.problem.dtype
        if tensor.dtype in tuning.current().fused_dtypes:
            dtype = tensor.dtype
        part = tensor[self.item, :, rows.start : rows.stop + self.shift * (self.count - 1)]
        if part.dtype != dtype or part.stride(-1) != 1:
            part = self.workspace.take(tuple(part.shape), dtype).copy_(part)
        return self._repeated(part, len(rows))

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return the blocks' queries of (batch, heads, n_q, ...), as a view."""
        return self._repeated(tensor[self.item, :, self.queries.start :], len(self.queries))

    def add(self, rows: Tensor, whole: Tensor) -> None:
        """Add the gradients of the blocks' keys to (batch, heads, n_k, dim)."""
        # No operation may add twice to the same number, so only keys that blocks do not share go together.
        size = self.shift if self.count > 1 else len(self.keys)
        for first in range(0, len(self.keys), size):
            part = rows[:, :, first : first + size]
            self._repeated(whole[self.item, :, self.keys.start + first :], part.shape[2]).add_(part)

    def _repeated(self, rows: Tensor, length: int) -> Tensor:
        """View (heads, n, ...) as (repetitions, heads, length, ...)."""
        size, strides = (self.count, len(rows), length), (self.shift * rows.stride(1), *rows.stride())
        return rows.as_strided((*size, *rows.shape[2:]), strides)
