"""The tiles of some batch items and heads: their scores, softmax, masks and dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..dropout import keep_mask
from ..logsums import LogSums, log_sums
from ..problem import Problem
from ..torch_private import multiplies_bfloat16
from .groups import Groups
from .matmul import add_product, put_product
from .onednn import onednn_suits
from .pieces import Piece
from .tables import BiasReader, Grid, Tables, Vectors
from .tiles import Scratch, Span, Tile
from .workspace import Workspace


class TileBlock(Groups):
    """Some batch items and heads of a piece, with everything that its tiles have in common.

    Tensors are (groups, rows, dim), with one group per item (or repetition, see ``Piece``) and head. Those of keys are
    (key groups, rows, dim), with one group per item and head of keys.
    """

    def __init__(
        self,
        problem: Problem,
        piece: Piece,
        tables: Tables,
        biases: list[BiasReader],
        workspace: Workspace,
        batch: range,
        heads: range,
    ) -> None:
        super().__init__(batch, heads, workspace)
        self.problem, self.piece, self.tables, self.biases = problem, piece, tables, biases
        self.narrow = _product_dtype(problem)
        self.onednn = _piece_by_onednn(problem, piece)
        self.sharing = min(len(heads), problem.heads // problem.value.shape[1])
        masks = problem.dense, piece.key_mask, piece.query_documents
        self.masked = any(mask is not None for mask in masks)
        dtype = problem.dtype
        self.value = self.rows(problem.value, piece.keys, self.narrow)
        self.query = self.key = None
        self.query_factors = self.key_factors = None
        if problem.query is not None and problem.key is not None:
            self.query = self.rows(problem.query, piece.queries, dtype)
            self.key = self.rows(problem.key, piece.keys, dtype)
        if problem.query_factors is not None and problem.key_factors is not None:
            self.query_factors = self.rows(problem.query_factors, piece.queries, dtype)
            self.key_factors = self.rows(problem.key_factors, piece.keys, dtype)

    def in_other(self, rows: Tensor, tensor: Tensor, where: range) -> Tensor:
        """Return the block's rows of a tensor in the dtype of scores, given them in that of the products after the
        softmax, or the other way around."""
        other = self.narrow if rows.dtype == self.problem.dtype else self.problem.dtype
        return rows if rows.dtype == other else self.rows(tensor, where, other)

    def rows(self, tensor: Tensor, where: range, dtype: torch.dtype) -> Tensor:
        """Return the block's part of (1 or batch, heads, n, dim) as (groups, rows, dim): a view if possible."""
        part = self.rows_of(tensor, where)
        items, heads, rows, dim = part.shape
        if part.dtype == dtype and items == len(self.batch):
            _, _, pitch, last = part.stride()
            if items == 1 and last == 1 and (pitch == dim or (pitch > dim and not self.onednn)):
                return part[0]
            if part.is_contiguous():
                return part.view(items * heads, rows, dim)
        copied = self.workspace.take((len(self.batch), heads, rows, dim), dtype)
        copied.copy_(part)
        return copied.flatten(0, 1)

    def rows_of(self, tensor: Tensor, rows: range) -> Tensor:
        """Return some rows of these items and heads of (1 or batch, heads or key heads, n, ...), as a view."""
        heads, piece = self._heads_in(tensor), self.piece
        if piece.repeats == 1:
            return tensor[self._items if tensor.shape[0] > 1 else slice(None), heads, rows.start : rows.stop]
        shift = len(piece.queries)
        first = rows.start + shift * self.batch.start
        start = tensor[piece.batch.start, heads, first:]
        size, strides = (len(self.batch), len(start), len(rows)), (shift * start.stride(1), *start.stride())
        return start.as_strided((*size, *start.shape[2:]), strides)

    def _heads_in(self, tensor: Tensor) -> slice:
        """Return these heads, or the heads of keys that they use, as an index into (batch, heads or key heads, ...)."""
        sharing = self.problem.heads // tensor.shape[1]
        return slice(self.heads.start // sharing, (self.heads.stop - 1) // sharing + 1)

    def of_keys(self, rows: Tensor) -> Tensor:
        """Return (groups, rows, ...) as (key groups, rows, ...): heads that share keys count as more rows of one.

        This is a view if the groups lie one after another.
        """
        if self.sharing == 1:
            return rows
        return rows.unflatten(0, (-1, self.sharing)).flatten(1, 2)

    def whole(self, tensor: Tensor, where: range) -> Tensor | None:
        """Return the block's part of an output or gradient as a view, (groups, rows, dim); None if there is none."""
        if tensor.dtype != self.problem.dtype or self.piece.repeats > 1 or self.sharing > 1:
            return None
        part = self.rows_of(tensor, where)
        if part.shape[0] == 1:
            return part[0]
        return part.view(self.groups, *part.shape[2:]) if tensor.is_contiguous() else None

    def put(self, rows: Tensor, whole: Tensor, where: range) -> None:
        """Write (groups, rows, dim) to its place in an output or a gradient (batch, heads, n, dim)."""
        target = self.rows_of(whole, where)
        target.copy_(rows.unflatten(0, target.shape[:2]))

    def add(self, rows: Tensor, whole: Tensor, where: range, scale: float = 1.0) -> None:
        """Add (key groups, rows, dim) to its place in the gradient of keys or values (batch, key heads, n, dim)."""
        target = self.rows_of(whole, where)
        # Torch would convert to new memory for each addition.
        wide = self.workspace.converted(rows, whole.dtype) if rows.dtype != whole.dtype else rows
        by_head = wide.unflatten(0, target.shape[:2])
        # Repetitions share keys, and no operation may add twice to the same number.
        for into, added in zip(target, by_head, strict=True) if self.piece.repeats > 1 else [(target, by_head)]:
            into.add_(added, alpha=scale)

    def tile_of(self, memory: Tensor, span: Span) -> Tensor:
        """Return a tile of the block, (groups, rows, columns), at the beginning of some memory."""
        size = self.groups, len(span.queries), len(span.keys)
        return memory[: math.prod(size)].view(size)

    def by_offset(self, scores: Tensor, span: Span, table: Vectors, scratch: Scratch) -> Tensor:
        """Sum each query's scores by offset, (groups, rows, T)."""
        tile = scratch.tile(self.groups, span)
        tile.scores.copy_(scores)
        return self.collected(tile, table)

    def collected(self, tile: Tile, table: Vectors) -> Tensor:
        """Sum the scores of a tile that can be read by diagonals, by offset: (groups, rows, T)."""
        found = tile.scores.new_zeros(*tile.scores.shape[:2], table.vectors.shape[1])
        table.collect(tile, found)
        return found

    def queries(self, span: Span) -> range:
        """Return a span's queries as indices into the problem."""
        return self.piece.queries[span.queries.start : span.queries.stop]

    def in_queries(self, span: Span) -> slice:
        """Return a span's queries as indices into the block."""
        return slice(span.queries.start, span.queries.stop)

    def in_keys(self, span: Span) -> slice:
        """Return a span's keys as indices into the block."""
        return slice(span.keys.start, span.keys.stop)

    def fill_weights(
        self,
        weights: Tensor,
        span: Span,
        table: Vectors | None,
        scratch: Scratch | None,
        *,
        capped: Tensor | None = None,
        wants_lse: bool = False,
    ) -> LogSums | None:
        """Write the softmax of some rows of scores, (groups, rows, keys).

        Args:
            table: the rows' part of the key table.
            scratch: memory for what the table adds.
            capped: receives the hyperbolic tangents of the soft cap, as large as ``weights``.
            wants_lse: whether to return the rows' log of sums.

        Returns:
            ``LogSums``, (2, groups, rows), if wanted.
        """
        rows, keys = self.in_queries(span), self.in_keys(span)
        by_head, softcap = self.by_head(weights), self.problem.softcap
        if self.query is not None and self.key is not None:
            scale = self.problem.scale if softcap is None else self.problem.scale / softcap
            query, key = self.of_keys(self.query[:, rows]), self.key[:, keys]
            put_product(self.of_keys(weights), query, key.mT, self.workspace, scale)
            if softcap is not None:
                weights.tanh_()
                if capped is not None:
                    capped.copy_(weights)
                weights *= softcap
        else:
            weights.zero_()
        if self.query_factors is not None and self.key_factors is not None:
            add_product(weights, self.query_factors[:, rows], self.key_factors[:, keys].mT, self.workspace)
        if table is not None and scratch is not None and self.query is not None:
            tile = scratch.tile(self.groups, span)
            table.spread(self.per_offset(self.query[:, rows], table).mul_(self.problem.scale), tile)
            weights += tile.scores
        for bias in self.biases:
            bias.add_to(by_head, span)
        if self.problem.dense is not None:
            by_head += self.dense_part(self.problem.dense, span)
        for allowed in self.masks(span):
            by_head.masked_fill_(~allowed, -torch.inf)
        # A row that may not attend to anything has no softmax.
        rows_may_be_empty = self.masked or self.tables.may_leave_nothing(span.queries)
        largest = weights.amax(-1, keepdim=True) if rows_may_be_empty or wants_lse else None
        nothing = largest.isneginf() if rows_may_be_empty and largest is not None else None
        torch.softmax(weights, -1, out=weights)
        if nothing is not None and nothing.any():
            weights.masked_fill_(nothing, 0.0)
        if largest is None or not wants_lse:
            return None
        return log_sums(largest.squeeze(-1), weights)

    def dense_part(self, dense: Tensor, span: Span) -> Tensor:
        """Return a tile's part of (1 or batch, heads, n_q, n_k), as a view."""
        rows = self.queries(span)
        columns = self.piece.keys[span.keys.start : span.keys.stop]
        return self.rows_of(dense, rows)[..., columns.start : columns.stop]

    def masks(self, span: Span) -> Iterator[Tensor]:
        """Yield masks of the pairs that may attend, each broadcastable to (batch, heads, rows, columns)."""
        piece, first = self.piece, self.batch.start - self.piece.batch.start
        items = slice(first, first + len(self.batch))
        queries, keys = self.in_queries(span), self.in_keys(span)
        if piece.key_mask is not None:
            yield piece.key_mask[items, None, None, keys]
        if piece.query_documents is not None and piece.key_documents is not None:
            documents = piece.query_documents[items, None, queries]
            yield documents.unsqueeze(-1) == piece.key_documents[items, None, None, keys]
        if self.problem.limits_offsets and not isinstance(self.tables.layout, Grid):
            offsets = self.tables.layout.offsets(span)
            if self.problem.min_offset is not None:
                yield offsets >= self.problem.min_offset
            if self.problem.max_offset is not None:
                yield offsets <= self.problem.max_offset

    def kept(self, span: Span) -> Tensor | None:
        """Return the factors that dropout puts on a tile's weights, (groups, rows, columns); None without dropout."""
        problem = self.problem
        if problem.dropout_seeds is None:
            return None
        rows = self.queries(span)
        columns = self.piece.keys[span.keys.start : span.keys.stop]
        seeds = self.part_of(problem.dropout_seeds)[..., rows.start : rows.stop].flatten(0, 1)
        kept = keep_mask(seeds, torch.arange(columns.start, columns.stop, device=seeds.device), problem.dropout_p)
        return kept.to(problem.dtype) / (1.0 - problem.dropout_p)

    def factor(self, tile: Tensor) -> Tensor:
        """Return a tile in the dtype of the products after the softmax."""
        return tile if tile.dtype == self.narrow and not self.onednn else self.workspace.converted(tile, self.narrow)


def _piece_by_onednn(problem: Problem, piece: Piece) -> bool:
    """Whether oneDNN computes all products of a piece except the smallest."""
    sizes = len(piece.queries), len(piece.keys), problem.value.shape[3]
    return onednn_suits(_product_dtype(problem), problem.value.device, *sizes)


def _product_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of products after the softmax: the input's if the device multiplies it fast."""
    dtype, on_cpu = problem.value.dtype, problem.value.device.type == "cpu"
    if dtype == torch.bfloat16 and on_cpu:
        return dtype if multiplies_bfloat16() else problem.dtype
    return problem.dtype if on_cpu else dtype
