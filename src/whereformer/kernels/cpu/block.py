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

    Tensors are (groups, rows, dim), with one group per item and head.
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
        masks = problem.dense, piece.key_mask, piece.query_documents
        self.masked = any(mask is not None for mask in masks)
        dtype = problem.dtype
        self.value, self.narrow_value = self.in_both(problem.value, piece.keys)
        self.query = self.key = self.narrow_query = self.narrow_key = None
        self.query_factors = self.key_factors = None
        if problem.query is not None and problem.key is not None:
            self.query, self.narrow_query = self.in_both(problem.query, piece.queries)
            self.key, self.narrow_key = self.in_both(problem.key, piece.keys)
        if problem.query_factors is not None and problem.key_factors is not None:
            self.query_factors = self.rows(problem.query_factors, piece.queries, dtype)
            self.key_factors = self.rows(problem.key_factors, piece.keys, dtype)

    def in_both(self, tensor: Tensor, where: range) -> tuple[Tensor, Tensor]:
        """Return the block's rows in the dtype of scores, and in that of the products after the softmax."""
        wide = self.rows(tensor, where, self.problem.dtype)
        return wide, wide if self.narrow == wide.dtype else self.rows(tensor, where, self.narrow)

    def rows(self, tensor: Tensor, where: range, dtype: torch.dtype) -> Tensor:
        """Return the block's part of (1 or batch, heads, n, dim) as (groups, rows, dim): a view if possible."""
        if tensor.shape[1] < self.problem.heads:
            return self._of_shared_heads(tensor, where, dtype)
        part = self.rows_of(tensor, where)
        items, heads, rows, dim = part.shape
        if part.dtype == dtype and items == len(self.batch):
            _, _, pitch, last = part.stride()
            if items == 1 and last == 1 and (pitch == dim or (pitch > dim and not self.onednn)):
                return part[0]
            if part.is_contiguous():
                return part.view(items * heads, rows, dim)
        copied = self.workspace.take((self.groups, rows, dim), dtype)
        self.by_head(copied).copy_(part)
        return copied

    def _of_shared_heads(self, tensor: Tensor, where: range, dtype: torch.dtype) -> Tensor:
        """Return keys or values of fewer heads, with those of each head of the block: a view if they share one."""
        sharing = self.problem.heads // tensor.shape[1]
        first, last = self.heads.start // sharing, (self.heads.stop - 1) // sharing
        if first == last and len(self.batch) == 1:
            rows = tensor[self.batch.start, first, where.start : where.stop]
            rows = rows if rows.dtype == dtype and rows.stride(-1) == 1 else self.workspace.converted(rows, dtype)
            return rows.expand(self.groups, -1, -1)
        copied = self.workspace.take((self.groups, len(where), tensor.shape[3]), dtype)
        for place, head in enumerate(self.heads):
            rows = tensor[self._items, head // sharing, where.start : where.stop]
            self.by_head(copied)[:, place].copy_(rows)
        return copied

    def whole(self, tensor: Tensor, where: range) -> Tensor | None:
        """Return the block's part of an output or gradient as a view, (groups, rows, dim); None if there is none."""
        if tensor.dtype != self.problem.dtype or tensor.shape[1] < self.problem.heads:
            return None
        part = self.rows_of(tensor, where)
        if part.shape[0] == 1:
            return part[0]
        return part.view(self.groups, *part.shape[2:]) if tensor.is_contiguous() else None

    def put(self, rows: Tensor, whole: Tensor, where: range) -> None:
        """Write (groups, rows, dim) to its place in an output or a gradient (batch, heads, n, dim)."""
        self.rows_of(whole, where).copy_(self.by_head(rows))

    def add_shared(self, rows: Tensor, whole: Tensor, where: range) -> None:
        """Add (groups, rows, dim) to the gradient of keys or values of fewer heads, (batch, fewer heads, n, dim)."""
        sharing = self.problem.heads // whole.shape[1]
        for place, head in enumerate(self.heads):
            whole[self._items, head // sharing, where.start : where.stop] += self.by_head(rows)[:, place]

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
        self, weights: Tensor, span: Span, table: Vectors | None, scratch: Scratch | None, capped: Tensor | None = None
    ) -> LogSums | None:
        """Write the softmax of some rows of scores, (groups, rows, keys).

        Args:
            table: the rows' part of the key table.
            scratch: memory for what the table adds.
            capped: receives the hyperbolic tangents of the soft cap, as large as ``weights``.

        Returns:
            ``LogSums``, (2, groups, rows), if the problem wants it.
        """
        rows, keys = self.in_queries(span), self.in_keys(span)
        by_head, softcap = self.by_head(weights), self.problem.softcap
        if self.query is not None and self.key is not None:
            scale = self.problem.scale if softcap is None else self.problem.scale / softcap
            put_product(weights, self.query[:, rows], self.key[:, keys].mT, self.workspace, scale)
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
        wanted = self.problem.wants_lse
        # A row that may not attend to anything has no softmax.
        rows_may_be_empty = self.masked or self.tables.may_leave_nothing(span.queries)
        largest = weights.amax(-1, keepdim=True) if rows_may_be_empty or wanted else None
        nothing = largest.isneginf() if rows_may_be_empty and largest is not None else None
        torch.softmax(weights, -1, out=weights)
        if nothing is not None and nothing.any():
            weights.masked_fill_(nothing, 0.0)
        if largest is None or not wanted:
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
