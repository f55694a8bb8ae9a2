"""The backward pass of "blockwise": it recomputes the softmax for some rows of scores at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..problem import GRADIENTS, Problem
from .block import TileBlock
from .matmul import add_product, put_product
from .plan import Plan, plans_of
from .tables import Vectors
from .tiles import Scratch, Span, Tile
from .workspace import Workspace


def backward(
    problem: Problem, output_gradient: Tensor, lse_gradient: Tensor | None, output: Tensor, needed: list[bool]
) -> list[Tensor]:
    """Return the needed gradients of the inputs in ``GRADIENTS``, in that order."""
    gradients = problem.new_gradients(needed)
    names = [name for name, need in zip(GRADIENTS, needed, strict=True) if need]
    into = dict(zip(names, gradients, strict=True))
    plans = plans_of(problem)
    # The gradient of dense scores that the batch shares is a sum over the batch, and that of a key over its pieces.
    overlap = any(plan.piece.overlaps for plan in plans) or problem.heads != problem.value.shape[1]
    summed = ("dense", "key", "value") if overlap else ("dense",)
    workspace = Workspace(output.device)
    for name, gradient in into.items():
        if name in summed and gradient.dtype != problem.dtype:
            into[name] = workspace.zeros(tuple(gradient.shape), problem.dtype)
        elif name in summed or problem.has_gaps() or problem.limits_offsets or name not in ("query", "key", "value"):
            gradient.zero_()
    for plan in plans:
        with workspace.scope():
            memory = BackwardMemory(plan, into, workspace)
            for block in plan.blocks(workspace):
                BlockBackward(block, memory, into, (output_gradient, lse_gradient), output).run()
    # Plans may share their tables, which have collected what all of them contribute.
    for tables in dict.fromkeys(plan.tables for plan in plans):
        for name, table in tables.by_name().items():
            if name in into:
                table.add_to(into[name])
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not into[name]:
            gradient.copy_(into[name])
    workspace.close()
    return gradients


class BackwardMemory:
    """Memory for the tiles of one piece: one for weights and, if needed, one for the soft cap's tangents and two that
    can be read by diagonals."""

    def __init__(self, plan: Plan, into: dict[str, Tensor], workspace: Workspace) -> None:
        dtype, size, tables = plan.problem.dtype, plan.size(), plan.tables
        self.spans = plan.spans
        self.weights = workspace.take((math.prod(size),), dtype)
        self.capped = None if plan.problem.softcap is None else workspace.take((math.prod(size),), dtype)
        vectors = any(table is not None for table in tables.vectors())
        self.gradient = Scratch(workspace, *size, tables.step if vectors or "bias" in into else 0, dtype)
        self.other = Scratch(workspace, *size, tables.step, dtype) if vectors else None


class BlockBackward:
    """Computes the gradients of one block; ``given`` are those of the output and of the log of the rows' sums."""

    def __init__(
        self,
        block: TileBlock,
        memory: BackwardMemory,
        into: dict[str, Tensor],
        given: tuple[Tensor, Tensor | None],
        output: Tensor,
    ) -> None:
        self.block, self.memory, self.into = block, memory, into
        problem, dtype = block.problem, block.problem.dtype
        queries, keys = block.piece.queries, block.piece.keys
        self.gradient = block.rows(given[0], queries, dtype)
        self.narrow_gradient = block.in_other(self.gradient, given[0], queries)
        self.value = block.in_other(block.value, problem.value, keys)
        self.narrow_query = self.narrow_key = None
        if problem.query is not None and problem.key is not None and block.query is not None and block.key is not None:
            self.narrow_query = block.in_other(block.query, problem.query, queries)
            self.narrow_key = block.in_other(block.key, problem.key, keys)
        delta = torch.linalg.vecdot(block.rows(output, queries, dtype), self.gradient)
        if given[1] is not None:
            # The gradient of a row's sum is its weights.
            delta -= block.rows_of(given[1], queries).flatten(0, 1)
        self.minus_delta = delta.neg_().unsqueeze(-1)
        of_keys = {"value": self.value, "key": block.key, "key_factors": block.key_factors}
        self.sums = {
            name: self._sums(name, rows)
            for name, rows in of_keys.items()
            if rows is not None and name in into and not self._adds_at_once(name)
        }

    def _sums(self, name: str, rows: Tensor) -> Tensor:
        """Return memory to sum a gradient in, (groups, keys, dim): the gradient's own where possible."""
        block = self.block
        if block.onednn:
            # In this layout ``add_product`` can sum products with a transposed tile.
            groups, keys, dim = rows.shape
            return block.workspace.take((groups, dim, keys), rows.dtype).mT
        separate = name == "key_factors" or self._adds(name)
        whole = None if separate else block.whole(self.into[name], block.piece.keys)
        return block.workspace.take(tuple(rows.shape), rows.dtype) if whole is None else whole

    def _adds(self, name: str) -> bool:
        """Whether other blocks have a part in the gradients of the same keys."""
        return self.block.piece.overlaps or self.into[name].shape[1] < self.block.problem.heads

    def _adds_at_once(self, name: str) -> bool:
        """Whether the block's only tile is added to a gradient, without sums."""
        return len(self.memory.spans) == 1 and name != "key_factors" and self._adds(name)

    def run(self) -> None:
        """Add what the block contributes to all gradients."""
        for span in self.memory.spans:
            with self.block.workspace.scope():
                self._add_rows(span, span is self.memory.spans[0])
        for name, sums in self.sums.items():
            self._put(name, sums)

    def _add_rows(self, span: Span, first: bool) -> None:
        """Add what some queries contribute; ``first`` says that nothing was summed before."""
        block, into, workspace = self.block, self.into, self.block.workspace
        key_table, value_table = block.tables.of_rows(span.queries)
        rows, keys = block.in_queries(span), block.in_keys(span)
        gradient, minus_delta = self.gradient[:, rows], self.minus_delta[:, rows]
        weights = block.tile_of(self.memory.weights, span)
        capped = None if self.memory.capped is None else block.tile_of(self.memory.capped, span)
        block.fill_weights(weights, span, key_table, self.memory.other, capped=capped)
        kept = block.kept(span)
        # First compute the weights' gradient minus delta. Multiplied by the weights, it is the scores' gradient.
        tile = self.memory.gradient.tile(block.groups, span)
        scores_gradient = tile.scores
        of_keys = block.of_keys(gradient)
        if value_table is None:
            put_product(block.of_keys(scores_gradient), of_keys, self.value[:, keys].mT, workspace)
        else:
            value_table.spread(block.per_offset(gradient, value_table), tile)
            add_product(block.of_keys(scores_gradient), of_keys, self.value[:, keys].mT, workspace)
        if kept is not None:
            scores_gradient.mul_(kept)
        scores_gradient.add_(minus_delta).mul_(weights)
        if kept is not None:
            weights *= kept
        if "value" in into:
            with workspace.scope():
                used, given = block.of_keys(block.factor(weights)), block.of_keys(self.narrow_gradient[:, rows])
                self._add_product("value", keys, used.mT, given, first)
        if value_table is not None and self.memory.other is not None and "value_table" in into:
            found = block.by_offset(weights, span, value_table, self.memory.other)
            block.collect_vectors(value_table, found, gradient)
        for name, table in block.tables.biases().items():
            if name in into:
                table.collect(tile, block.heads)
        if "dense" in into:
            by_head = block.by_head(scores_gradient)
            part = block.dense_part(into["dense"], span)
            part += by_head if len(part) == len(by_head) else by_head.sum(0, keepdim=True)
        self._add_to_factors(span, scores_gradient, first)
        self._add_to_content(span, tile, key_table, capped, first)

    def _add_product(
        self, name: str, keys: slice, left: Tensor, right: Tensor, first: bool, scale: float = 1.0
    ) -> None:
        """Add a product to the sums of some keys."""
        block, workspace, sums = self.block, self.block.workspace, self.sums.get(name)
        if sums is None:
            found = workspace.take((left.shape[0], left.shape[1], right.shape[2]), left.dtype)
            put_product(found, left, right, workspace)
            block.add(found, self.into[name], block.piece.keys[keys], scale)
        elif first:
            put_product(sums[:, keys], left, right, workspace, scale)
            sums[:, : keys.start] = 0
            sums[:, keys.stop :] = 0
        else:
            add_product(sums[:, keys], left, right, workspace, scale)

    def _add_to_factors(self, span: Span, scores_gradient: Tensor, first: bool) -> None:
        """Add to the gradients of a ``FactorPair``."""
        block, into = self.block, self.into
        if block.query_factors is None or block.key_factors is None:
            return
        rows, keys = block.in_queries(span), block.in_keys(span)
        if "query_factors" in into:
            size = (*scores_gradient.shape[:2], block.key_factors.shape[2])
            found = block.workspace.take(size, scores_gradient.dtype)
            put_product(found, scores_gradient, block.key_factors[:, keys], block.workspace)
            self._add("query_factors", found, block.queries(span))
        if "key_factors" in into:
            self._add_product("key_factors", keys, scores_gradient.mT, block.query_factors[:, rows], first)

    def _add_to_content(
        self, span: Span, tile: Tile, key_table: Vectors | None, capped: Tensor | None, first: bool
    ) -> None:
        """Add to the gradients of query, key and the key table; ``capped`` are the soft cap's tangents."""
        block, into, scale, workspace = self.block, self.into, self.block.problem.scale, self.block.workspace
        if block.query is None or self.narrow_key is None or self.narrow_query is None:
            return
        rows, keys = block.in_queries(span), block.in_keys(span)
        per_offset = None
        if key_table is not None and ("query" in into or "key_table" in into):
            per_offset = block.collected(tile, key_table).mul_(scale)
            if "key_table" in into:
                block.collect_vectors(key_table, per_offset, block.query[:, rows])
        if capped is not None:
            # The cap holds for the products of queries and keys alone, and nothing else needs the gradients any more.
            tile.scores.mul_(capped.square_().neg_().add_(1.0))
        factor = block.of_keys(block.factor(tile.scores) if "query" in into or "key" in into else tile.scores)
        if "key" in into:
            self._add_product("key", keys, factor.mT, block.of_keys(self.narrow_query[:, rows]), first, scale)
        if "query" in into:
            target = block.whole(into["query"], block.queries(span))
            found = target
            if found is None:
                found = workspace.take((*tile.scores.shape[:2], block.query.shape[2]), tile.scores.dtype)
            put_product(block.of_keys(found), factor, self.narrow_key[:, keys], workspace, scale)
            if key_table is not None and per_offset is not None:
                found += block.from_offsets(per_offset, key_table)
            if target is None:
                block.put(found, into["query"], block.queries(span))

    def _put(self, name: str, sums: Tensor) -> None:
        """Write the sums of a gradient to its place."""
        if name == "key_factors":
            self._add(name, sums, self.block.piece.keys)
        elif self._adds(name):
            self.block.add(sums, self.into[name], self.block.piece.keys)
        elif self.block.onednn or sums.dtype != self.into[name].dtype:
            self.block.put(sums, self.into[name], self.block.piece.keys)

    def _add(self, name: str, rows: Tensor, where: range) -> None:
        """Add (groups, rows, dim) to the gradient of factors, which the batch may share."""
        target = self.block.rows_of(self.into[name], where)
        by_head = self.block.by_head(rows)
        target += by_head if len(target) == len(by_head) else by_head.sum(0, keepdim=True)
