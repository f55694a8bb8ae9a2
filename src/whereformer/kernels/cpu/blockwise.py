"""Attention with position terms in O(n) extra memory, forward and backward, in plain PyTorch on any device.

Scores exist some rows at a time, in memory that is used again. A row has all of its keys, so its softmax is one call,
and the backward makes it anew instead of reading what the forward kept: both give weights that sum to one, however
large the scores are. (Torch's own kernels, see ``fused_bias``, are given small biases only.) Scores and everything that
is summed over many of them are float32 (or float64); bfloat16 input is multiplied as bfloat16 only where torch's own
attention does so too, after the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import tuning
from ..call import Call
from ..dropout import keep_mask
from ..precision import without_autocast
from ..problem import ARGUMENTS, GRADIENTS, Problem, register_gradients
from . import fused_bias, short
from .groups import Groups, cut
from .pieces import Piece
from .tables import BiasReader, Grid, GridRows, Rows, Tables
from .tiles import Scratch, Span, Tile, chunks
from .workspace import Workspace, add_product, onednn_suits, put_product


def attend(call: Call) -> Tensor:
    """The attention output, (batch, heads, n_q, value_dim) in the value's dtype."""
    with without_autocast(call.value.device):
        problem = Problem.of(call)
        output, _ = _forward(*replace(problem, keeps=keeps(problem, problem.value.device)).arguments())
        return output


def keeps(problem: Problem, device: torch.device) -> str:
    """What the forward of a problem on that device keeps for the backward, see ``Problem``."""
    return "weights" if short.takes(problem, device) else "norm" if fused_bias.trains(problem, device) else "nothing"


def explain(call: Call) -> str:
    """Which of the ways to compute a call is taken, for :func:`whereformer.explain`."""
    device = call.value.device
    # Looking draws no seed of dropout.
    with torch.random.fork_rng(devices=[]), without_autocast(device):
        problem = Problem.of(call)
        if short.takes(problem, device):
            return "{kind}: so few scores a head that training keeps their softmax"
        if any(fused_bias.takes(problem, plan.piece, plan.tables) for plan in _plans(problem)):
            return "{kind}: torch's own kernels read the table of offsets"
    return "tile by tile, in O(n) memory"


class Block(Groups):
    """A piece's work on some of its batch items and heads, with all that does not change from tile to tile.

    Tensors are (groups, rows, dim), a group for each item and head.
    """

    def __init__(
        self,
        problem: Problem,
        piece: Piece,
        tables: Tables,
        bias: BiasReader | None,
        workspace: Workspace,
        batch: range,
        heads: range,
    ) -> None:
        super().__init__(batch, heads, workspace)
        self.problem, self.piece, self.tables, self.bias = problem, piece, tables, bias
        self.narrow = _product_dtype(problem)
        self.onednn = _piece_by_onednn(problem, piece)
        masks = problem.dense, piece.key_mask, piece.query_documents
        self.forbids = tables.forbids or any(mask is not None for mask in masks)
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
        """The block's rows in the dtype of scores, and in that of the products after the softmax."""
        wide = self.rows(tensor, where, self.problem.dtype)
        return wide, wide if self.narrow == wide.dtype else self.rows(tensor, where, self.narrow)

    def rows(self, tensor: Tensor, where: range, dtype: torch.dtype) -> Tensor:
        """The block's part of (1 or batch, heads, n, dim), (groups, rows, dim): a view if it can be one."""
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

    def whole(self, tensor: Tensor, where: range) -> Tensor | None:
        """The block's part of an output or a gradient, (groups, rows, dim), a view; None where it is no such view."""
        if tensor.dtype != self.problem.dtype:
            return None
        part = self.rows_of(tensor, where)
        if part.shape[0] == 1:
            return part[0]
        return part.view(self.groups, *part.shape[2:]) if tensor.is_contiguous() else None

    def put(self, rows: Tensor, whole: Tensor, where: range) -> None:
        """Write (groups, rows, dim) to its place in an output or a gradient (batch, heads, n, dim)."""
        self.rows_of(whole, where).copy_(self.by_head(rows))

    def tile_of(self, memory: Tensor, span: Span) -> Tensor:
        """A tile of the block, (groups, rows, columns): the beginning of some memory."""
        size = self.groups, len(span.queries), len(span.keys)
        return memory[: math.prod(size)].view(size)

    def by_offset(self, scores: Tensor, span: Span, table: Rows, scratch: Scratch) -> Tensor:
        """Each query's scores summed by offset, (groups, rows, T)."""
        tile = scratch.tile(self.groups, span)
        tile.scores.copy_(scores)
        return self.collected(tile, table)

    def collected(self, tile: Tile, table: Rows) -> Tensor:
        """The same of a tile that can be read by diagonals."""
        found = tile.scores.new_zeros(*tile.scores.shape[:2], table.vectors.shape[1])
        table.collect(tile, found)
        return found

    def queries(self, span: Span) -> range:
        """A span's queries among all of the problem's."""
        return self.piece.queries[span.queries.start : span.queries.stop]

    def in_queries(self, span: Span) -> slice:
        """A span's queries among the block's."""
        return slice(span.queries.start, span.queries.stop)

    def fill_weights(self, weights: Tensor, span: Span, table: Rows | None, scratch: Scratch | None) -> None:
        """Write the softmax of some rows' scores, (groups, rows, keys); ``table`` is the part of the keys' table."""
        rows, keys = self.in_queries(span), slice(0, span.keys.stop)
        by_head = self.by_head(weights)
        if self.query is not None and self.key is not None:
            put_product(weights, self.query[:, rows], self.key[:, keys].mT, self.workspace, self.problem.scale)
        else:
            weights.zero_()
        if self.query_factors is not None and self.key_factors is not None:
            add_product(weights, self.query_factors[:, rows], self.key_factors[:, keys].mT, self.workspace)
        if table is not None and scratch is not None and self.query is not None:
            tile = scratch.tile(self.groups, span)
            table.spread(self.per_offset(self.query[:, rows], table).mul_(self.problem.scale), tile)
            weights += tile.scores
        if self.bias is not None:
            self.bias.add_to(by_head, span)
        if self.problem.dense is not None:
            by_head += self.dense_part(self.problem.dense, span)
        for allowed in self.masks(span):
            by_head.masked_fill_(~allowed, -torch.inf)
        # A row that may attend nothing has no softmax.
        nothing = weights.amax(-1, keepdim=True).isneginf() if self.forbids else None
        torch.softmax(weights, -1, out=weights)
        if nothing is not None and nothing.any():
            weights.masked_fill_(nothing, 0.0)

    def dense_part(self, dense: Tensor, span: Span) -> Tensor:
        """A tile's part of (1 or batch, heads, n_q, n_k), a view."""
        rows = self.queries(span)
        columns = self.piece.keys[span.keys.start : span.keys.stop]
        return self.rows_of(dense, rows)[..., columns.start : columns.stop]

    def masks(self, span: Span) -> Iterator[Tensor]:
        """Which pairs of a tile may attend, each broadcastable to (batch, heads, rows, columns)."""
        piece, first = self.piece, self.batch.start - self.piece.batch.start
        items = slice(first, first + len(self.batch))
        queries, keys = slice(span.queries.start, span.queries.stop), slice(span.keys.start, span.keys.stop)
        if piece.key_mask is not None:
            yield piece.key_mask[items, None, None, keys]
        if piece.query_documents is not None and piece.key_documents is not None:
            documents = piece.query_documents[items, None, queries]
            yield documents.unsqueeze(-1) == piece.key_documents[items, None, None, keys]
        if self.problem.causal and not isinstance(self.tables.layout, Grid):
            yield self.tables.layout.offsets(span) <= 0

    def kept(self, span: Span) -> Tensor | None:
        """What dropout multiplies a tile's weights by, (groups, rows, columns)."""
        problem = self.problem
        if problem.dropout_keys is None:
            return None
        rows = self.queries(span)
        columns = self.piece.keys[span.keys.start : span.keys.stop]
        keys = self.part_of(problem.dropout_keys)[..., rows.start : rows.stop].flatten(0, 1)
        kept = keep_mask(keys, torch.arange(columns.start, columns.stop, device=keys.device), problem.dropout_p)
        return kept.to(problem.dtype) / (1.0 - problem.dropout_p)

    def factor(self, tile: Tensor) -> Tensor:
        """A tile as a factor of the products after the softmax."""
        return tile if tile.dtype == self.narrow and not self.onednn else self.workspace.converted(tile, self.narrow)


class Plan:
    """How a piece is cut: into groups of items and heads, and each of those into tiles, some queries and their keys."""

    def __init__(self, problem: Problem, piece: Piece, tables: Tables) -> None:
        self.problem, self.piece, self.tables = problem, piece, tables
        n_q, n_k, sizes = len(piece.queries), len(piece.keys), tuning.current()
        scores = sizes.tile_scores * torch.get_num_threads() if problem.value.device.type == "cpu" else GPU_SCORES
        self.groups = max(1, scores // (n_q * n_k))
        if any(isinstance(table, GridRows) and len(table.window) > n_k for table in tables.rows()):
            # Few rows of many heads reach less of a long table than many rows of few heads.
            self.groups *= tuning.MORE_GROUPS
        # Tiles that are read by diagonals have room for as many columns more as they have rows.
        most = math.isqrt(2 * scores // (self.groups * max(1, tables.step)))
        self.rows = min(n_q, max(sizes.tile_rows, min(most, scores // (self.groups * n_k))))
        self.parts = list(cut(piece.batch, problem.value.shape[1], self.groups))
        self.spans = self._spans()

    def size(self) -> tuple[int, int, int]:
        """Groups, rows and columns of the largest tile."""
        groups = max(len(heads) * len(batch) for heads, batches in self.parts for batch in batches)
        rows, columns = (max(len(span.queries) for span in self.spans), max(len(span.keys) for span in self.spans))
        return groups, rows, columns

    def _spans(self) -> list[Span]:
        """The tiles of a block; keys that no query of a tile may attend are left out, and so are tiles without keys."""
        n_q, n_k, grid = len(self.piece.queries), len(self.piece.keys), self.tables.layout
        spans = []
        for queries in chunks(range(n_q), self.rows):
            end = n_k
            if isinstance(grid, Grid) and self.problem.causal:
                end = max(0, min(n_k, grid.past(queries)))
            if end:
                spans.append(Span(queries, range(end)))
        return spans

    def blocks(self, workspace: Workspace) -> Iterator[Block]:
        """The blocks; what they take of the workspace is free again when the next one begins."""
        for heads, batches in self.parts:
            with workspace.scope():
                bias = None
                if self.tables.bias is not None:
                    bias = self.tables.bias.reader(heads, workspace)
                for batch in batches:
                    with workspace.scope():
                        yield Block(self.problem, self.piece, self.tables, bias, workspace, batch, heads)


GPU_SCORES = 2**24
"""Scores in a tile where there is no cache to stay in, and each operation costs a launch."""


def _plans(problem: Problem) -> list[Plan]:
    """One for each piece that has something to compute."""
    plans = []
    for piece in problem.pieces():
        if piece.batch and problem.value.shape[1] and piece.queries and piece.keys:
            plan = Plan(problem, piece, Tables(problem, piece))
            if plan.spans:
                plans.append(plan)
    return plans


def _piece_by_onednn(problem: Problem, piece: Piece) -> bool:
    """Whether oneDNN computes all of a piece's products, except the smallest."""
    sizes = len(piece.queries), len(piece.keys), problem.value.shape[3]
    return onednn_suits(_product_dtype(problem), problem.value.device, *sizes)


def _product_dtype(problem: Problem) -> torch.dtype:
    """Of the products after the softmax: the input's where the device multiplies it fast."""
    dtype, on_cpu = problem.value.dtype, problem.value.device.type == "cpu"
    if dtype == torch.bfloat16 and on_cpu:
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return dtype if fast else problem.dtype
    return problem.dtype if on_cpu else dtype


@torch.library.custom_op("whereformer::blockwise_forward", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*arguments)
    with without_autocast(problem.value.device):
        return short.forward(problem) if problem.keeps == "weights" else forward(problem)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*arguments)
    if problem.keeps == "weights":
        return short.new_output(problem), short.new_weights(problem)
    return problem.new_output(), fused_bias.new_norm(problem) if problem.keeps == "norm" else problem.value.new_empty(0)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output, and what the backward wants to know again: the norm of rows where it is torch's, else nothing."""
    workspace = Workspace(problem.value.device)
    plans = _plans(problem)
    whole = len(plans) == 1 and not problem.has_gaps()
    if problem.keeps == "norm" or (whole and fused_bias.takes(problem, plans[0].piece, plans[0].tables)):
        output, norm = fused_bias.forward(problem, plans[0].piece, plans[0].tables, workspace)
        workspace.close()
        return output, norm if problem.keeps == "norm" else problem.value.new_empty(0)
    output = problem.new_output()
    if problem.has_gaps() or problem.causal:
        output.zero_()
    for plan in plans:
        piece = plan.piece
        with workspace.scope():
            if fused_bias.takes(problem, piece, plan.tables):
                found, _ = fused_bias.forward(problem, piece, plan.tables, workspace)
                items, queries = (slice(part.start, part.stop) for part in (piece.batch, piece.queries))
                output[items, :, queries] = found
            else:
                rows = Forward(plan, output, workspace)
                for block in plan.blocks(workspace):
                    rows.run(block)
    workspace.close()
    return output, problem.value.new_empty(0)


class Forward:
    """The outputs of a piece, tile by tile."""

    def __init__(self, plan: Plan, output: Tensor, workspace: Workspace) -> None:
        self.plan, self.output, self.workspace = plan, output, workspace
        dtype, size = plan.problem.dtype, plan.size()
        self.weights = workspace.take((math.prod(size),), dtype)
        vectors = any(table is not None for table in plan.tables.rows())
        self.scratch = Scratch(workspace, *size, plan.tables.step, dtype) if vectors else None

    def run(self, block: Block) -> None:
        """Write the outputs of a block."""
        target = block.whole(self.output, block.piece.queries)
        for span in self.plan.spans:
            with self.workspace.scope():
                if target is None:
                    size = (block.groups, len(span.queries), self.output.shape[3])
                    total = self.workspace.take(size, self.plan.problem.dtype)
                    self._put_rows(block, span, total)
                    block.put(total, self.output, block.queries(span))
                else:
                    self._put_rows(block, span, target[:, block.in_queries(span)])

    def _put_rows(self, block: Block, span: Span, total: Tensor) -> None:
        """Write the outputs of some queries to ``total``, (groups, rows, value_dim)."""
        keys, values = block.tables.of_rows(span.queries)
        weights = block.tile_of(self.weights, span)
        block.fill_weights(weights, span, keys, self.scratch)
        kept = block.kept(span)
        if kept is not None:
            weights *= kept
        put_product(total, block.factor(weights), block.narrow_value[:, : len(span.keys)], self.workspace)
        if values is not None and self.scratch is not None:
            total += block.from_offsets(block.by_offset(weights, span, values, self.scratch), values)


@torch.library.custom_op(
    "whereformer::blockwise_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor output, Tensor kept, bool[] needed, {ARGUMENTS}) -> Tensor[]",
)
def _backward(
    output_gradient: Tensor, output: Tensor, kept: Tensor, needed: list[bool], *arguments: Any
) -> list[Tensor]:
    problem = Problem(*arguments)
    with without_autocast(problem.value.device):
        if problem.keeps == "weights":
            return short.backward(problem, output_gradient, kept, needed)
        if problem.keeps == "norm" and fused_bias.is_exact(problem):
            return fused_bias.backward(problem, output_gradient, output, kept, needed)
        return backward(problem, output_gradient, output, needed)


@_backward.register_fake
def _(output_gradient: Tensor, output: Tensor, kept: Tensor, needed: list[bool], *arguments: Any) -> list[Tensor]:
    return Problem(*arguments).new_gradients(needed)


def backward(problem: Problem, output_gradient: Tensor, output: Tensor, needed: list[bool]) -> list[Tensor]:
    """The gradients of the inputs in ``GRADIENTS`` that are needed, in that order."""
    gradients = problem.new_gradients(needed)
    names = [name for name, need in zip(GRADIENTS, needed, strict=True) if need]
    into = dict(zip(names, gradients, strict=True))
    for name, gradient in into.items():
        if problem.has_gaps() or problem.causal or name not in ("query", "key", "value"):
            gradient.zero_()
    dense = into.get("dense")
    if dense is not None and dense.dtype != problem.dtype:
        # Of scores that the batch shares it is a sum over the batch.
        into["dense"] = torch.zeros_like(dense, dtype=problem.dtype)
    workspace = Workspace(output.device)
    for plan in _plans(problem):
        with workspace.scope():
            memory = BackwardMemory(plan, into, workspace)
            for block in plan.blocks(workspace):
                BlockBackward(block, memory, into, output_gradient, output).run(plan.spans)
        tables = plan.tables
        for name, table in (("bias", tables.bias), ("keys", tables.keys), ("values", tables.values)):
            if table is not None and name in into:
                table.add_to(into[name])
    workspace.close()
    if dense is not None and dense is not into["dense"]:
        dense.copy_(into["dense"])
    return gradients


class BackwardMemory:
    """Memory for the tiles of one piece: of weights, and two that can be read by diagonals where that is needed."""

    def __init__(self, plan: Plan, into: dict[str, Tensor], workspace: Workspace) -> None:
        dtype, size, tables = plan.problem.dtype, plan.size(), plan.tables
        self.weights = workspace.take((math.prod(size),), dtype)
        vectors = any(table is not None for table in tables.rows())
        self.gradient = Scratch(workspace, *size, tables.step if vectors or "bias" in into else 0, dtype)
        self.other = Scratch(workspace, *size, tables.step, dtype) if vectors else None


class BlockBackward:
    """The gradients of one block."""

    def __init__(
        self,
        block: Block,
        memory: BackwardMemory,
        into: dict[str, Tensor],
        output_gradient: Tensor,
        output: Tensor,
    ) -> None:
        self.block, self.memory, self.into = block, memory, into
        queries, dtype = block.piece.queries, block.problem.dtype
        self.gradient, self.narrow_gradient = block.in_both(output_gradient, queries)
        delta = torch.linalg.vecdot(block.rows(output, queries, dtype), self.gradient)
        self.minus_delta = delta.neg_().unsqueeze(-1)
        of_keys = {"value": block.value, "key": block.key, "key_factors": block.key_factors}
        self.sums = {
            name: self._sums(name, rows) for name, rows in of_keys.items() if rows is not None and name in into
        }

    def _sums(self, name: str, rows: Tensor) -> Tensor:
        """Memory to sum a gradient in, (groups, keys, dim): the gradient itself where it can be."""
        block = self.block
        if block.onednn:
            # So ``add_product`` makes sums of products with a transposed tile.
            groups, keys, dim = rows.shape
            return block.workspace.take((groups, dim, keys), rows.dtype).mT
        whole = None if name == "key_factors" else block.whole(self.into[name], block.piece.keys)
        return block.workspace.take(tuple(rows.shape), rows.dtype) if whole is None else whole

    def run(self, spans: list[Span]) -> None:
        """Add what the block contributes to all gradients."""
        for span in spans:
            with self.block.workspace.scope():
                self._add_rows(span, span is spans[0])
        for name, sums in self.sums.items():
            self._put(name, sums)

    def _add_rows(self, span: Span, first: bool) -> None:
        """Add what some queries contribute; ``first``: nothing was summed before."""
        block, into, workspace = self.block, self.into, self.block.workspace
        keys_table, values_table = block.tables.of_rows(span.queries)
        rows, keys = block.in_queries(span), slice(0, span.keys.stop)
        gradient, minus_delta = self.gradient[:, rows], self.minus_delta[:, rows]
        weights = block.tile_of(self.memory.weights, span)
        block.fill_weights(weights, span, keys_table, self.memory.other)
        kept = block.kept(span)
        # First the gradient of the weights less delta, then of the scores: weights times that.
        tile = self.memory.gradient.tile(block.groups, span)
        scores_gradient = tile.scores
        common = minus_delta if kept is None else torch.zeros_like(minus_delta)
        if values_table is None:
            scores_gradient.copy_(common.expand_as(weights))
        else:
            values_table.spread(block.per_offset(gradient, values_table) + common, tile)
        add_product(scores_gradient, gradient, block.value[:, keys].mT, workspace)
        if kept is not None:
            scores_gradient.mul_(kept).add_(minus_delta)
        scores_gradient.mul_(weights)
        if kept is not None:
            weights *= kept
        if "value" in into:
            with workspace.scope():
                self._add_product("value", keys, block.factor(weights).mT, self.narrow_gradient[:, rows], first)
        if values_table is not None and self.memory.other is not None and "values" in into:
            found = block.by_offset(weights, span, values_table, self.memory.other)
            block.collect_vectors(values_table, found, gradient)
        if "bias" in into and block.tables.bias is not None:
            block.tables.bias.collect(tile, block.heads)
        if "dense" in into:
            by_head = block.by_head(scores_gradient)
            part = block.dense_part(into["dense"], span)
            part += by_head if len(part) == len(by_head) else by_head.sum(0, keepdim=True)
        self._add_to_factors(span, scores_gradient, first)
        self._add_to_content(span, tile, keys_table, first)

    def _add_product(
        self, name: str, keys: slice, left: Tensor, right: Tensor, first: bool, scale: float = 1.0
    ) -> None:
        """Add a product to the sums of some keys."""
        sums, workspace = self.sums[name], self.block.workspace
        if first:
            put_product(sums[:, keys], left, right, workspace, scale)
            sums[:, keys.stop :] = 0
        else:
            add_product(sums[:, keys], left, right, workspace, scale)

    def _add_to_factors(self, span: Span, scores_gradient: Tensor, first: bool) -> None:
        """The gradients of a ``FactorPair``."""
        block, into = self.block, self.into
        if block.query_factors is None or block.key_factors is None:
            return
        rows, keys = block.in_queries(span), slice(0, span.keys.stop)
        if "query_factors" in into:
            size = (*scores_gradient.shape[:2], block.key_factors.shape[2])
            found = block.workspace.take(size, scores_gradient.dtype)
            put_product(found, scores_gradient, block.key_factors[:, keys], block.workspace)
            self._add("query_factors", found, block.queries(span))
        if "key_factors" in into:
            self._add_product("key_factors", keys, scores_gradient.mT, block.query_factors[:, rows], first)

    def _add_to_content(self, span: Span, tile: Tile, keys_table: Rows | None, first: bool) -> None:
        """The gradients of query, key and a table of keys."""
        block, into, scale, workspace = self.block, self.into, self.block.problem.scale, self.block.workspace
        if block.query is None or block.narrow_key is None or block.narrow_query is None:
            return
        rows, keys = block.in_queries(span), slice(0, span.keys.stop)
        factor = block.factor(tile.scores) if "query" in into or "key" in into else tile.scores
        if "key" in into:
            self._add_product("key", keys, factor.mT, block.narrow_query[:, rows], first, scale)
        per_offset = None
        if keys_table is not None and ("query" in into or "keys" in into):
            per_offset = block.collected(tile, keys_table).mul_(scale)
            if "keys" in into:
                block.collect_vectors(keys_table, per_offset, block.query[:, rows])
        if "query" in into:
            target = block.whole(into["query"], block.queries(span))
            found = target
            if found is None:
                found = workspace.take((*tile.scores.shape[:2], block.query.shape[2]), tile.scores.dtype)
            put_product(found, factor, block.narrow_key[:, keys], workspace, scale)
            if keys_table is not None and per_offset is not None:
                found += block.from_offsets(per_offset, keys_table)
            if target is None:
                block.put(found, into["query"], block.queries(span))

    def _put(self, name: str, sums: Tensor) -> None:
        """Put what was summed where it belongs."""
        if name == "key_factors":
            self._add(name, sums, self.block.piece.keys)
        elif self.block.onednn or sums.dtype != self.into[name].dtype:
            self.block.put(sums, self.into[name], self.block.piece.keys)

    def _add(self, name: str, rows: Tensor, where: range) -> None:
        """Add (groups, rows, dim) to factors, which the batch may share."""
        target = self.block.rows_of(self.into[name], where)
        by_head = self.block.by_head(rows)
        target += by_head if len(target) == len(by_head) else by_head.sum(0, keepdim=True)


register_gradients(_forward, _backward)
