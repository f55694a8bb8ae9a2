"""Attention of short sequences on the CPU: all scores at once, and the softmax weights are kept for the backward.

A row of weights has a few hundred numbers at most, not many more than its query, key, value and output together.
Keeping them costs little memory and saves computing them again. What all items of the batch add to their scores, which
is every term except content, is computed once.

Rows are in their own order, scores are in natural units, and everything is in the input's float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .. import tuning
from ..dropout import keep_mask
from ..logsums import log_sums, put_nothing
from ..problem import GRADIENTS, Problem
from ..torch_private import softmax_backward_
from ..tracing import holds
from .grids import WrittenOutGrid
from .groups import Groups, cut
from .matmul import add_product, put_product
from .pieces import Piece
from .tables import Grid, GridBias, GridVectors, Tables, Vectors, is_grid
from .workspace import Workspace


def takes(problem: Problem, device: torch.device) -> bool:
    """Whether this module computes a problem. Without a backward, going tile by tile is as fast."""
    value = problem.value
    inputs = (getattr(problem, name) for name in GRADIENTS)
    return (
        device.type == "cpu"
        # What asks least comes first.
        and torch.is_grad_enabled()
        and value.dtype in (torch.float32, torch.float64)
        and value.numel() > 0
        and holds(0 < problem.n_q * problem.n_k <= tuning.current().kept_scores)
        # With many queries and few keys, the diagonals reach far beyond the keys.
        and holds(problem.n_q * (problem.n_q + problem.n_k) <= 4 * tuning.current().kept_scores)
        and problem.query_documents is None
        and problem.softcap is None
        and problem.heads == value.shape[1]
        and is_grid(*problem.positions())
        and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    )


def new_output(problem: Problem) -> Tensor:
    """Allocate the output, contiguous so that its parts are views."""
    return problem.value.new_empty(*problem.value.shape[:2], problem.n_q, problem.value.shape[3])


def new_weights(problem: Problem) -> Tensor:
    """Allocate the weights, (batch, heads, n_q, n_k)."""
    return problem.value.new_empty(*problem.value.shape[:2], problem.n_q, problem.n_k)


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the weights before dropout, and ``LogSums``."""
    output, weights, lse = new_output(problem), new_weights(problem), problem.new_lse()
    if problem.has_gaps():
        output.zero_()
        put_nothing(lse)
    work = _Work(problem)
    values = work.tables.value_table
    for part in work.parts():
        part_weights = part.weights(weights)
        part.fill_scores(part_weights)
        largest = part_weights.amax(-1) if problem.wants_lse else None
        torch.softmax(part_weights, -1, out=part_weights)
        if largest is not None:
            for row, found in zip(lse, log_sums(largest, part_weights), strict=True):
                part.part_of(row).copy_(part.by_head(found))
        if part_weights[..., 0].isnan().any():
            scores = torch.empty_like(part_weights)
            part.fill_scores(scores)
            part_weights.masked_fill_(scores.isneginf().all(-1, keepdim=True), 0.0)
        kept = part.kept()
        used = part_weights if kept is None else kept.mul_(part_weights)
        target = part.query_rows(output)
        put_product(target, used, part.key_rows(problem.value), work.workspace)
        if values is not None:
            target += part.from_offsets(part.collect(used, values), values)
    work.workspace.close()
    return output, weights, lse


def backward(
    problem: Problem, output_gradient: Tensor, lse_gradient: Tensor | None, weights: Tensor, needed: list[bool]
) -> list[Tensor]:
    """Return the needed gradients of the inputs in ``GRADIENTS``, in that order."""
    gradients = problem.new_gradients(needed)
    into = dict(zip((name for name, need in zip(GRADIENTS, needed, strict=True) if need), gradients, strict=True))
    for name, gradient in into.items():
        if problem.has_gaps() or name not in ("query", "key", "value"):
            gradient.zero_()
    work = _Work(problem)
    if any(name in into for name in work.common):
        work.sums = work.workspace.zeros((weights.shape[1:]), weights.dtype)
    for part in work.parts():
        with work.workspace.scope():
            given = part.query_rows(output_gradient), None if lse_gradient is None else part.part_of(lse_gradient)
            _add_gradients(part, into, given, part.weights(weights))
    work.finish(into)
    work.workspace.close()
    return gradients


def _add_gradients(part: _Part, into: dict[str, Tensor], given: tuple[Tensor, Tensor | None], weights: Tensor) -> None:
    """Add what a part of the batch contributes to the gradients.

    ``given`` are the gradients of its output, (groups, n_q, dim), and of the log of its rows' sums, (batch, heads,
    n_q).
    """
    gradient, of_sums = given
    work, problem, tables = part.work, part.work.problem, part.work.tables
    scores_gradient = work.workspace.take(tuple(weights.shape), weights.dtype)
    value = part.key_rows(problem.value)
    if tables.value_table is None:
        put_product(scores_gradient, gradient, value.mT, work.workspace)
    else:
        part.spread(part.per_offset(gradient, tables.value_table), tables.value_table, scores_gradient)
        add_product(scores_gradient, gradient, value.mT, work.workspace)
    kept = part.kept()
    used = weights
    if kept is not None:
        scores_gradient *= kept
        used = kept.mul_(weights)
    if "value" in into:
        put_product(part.key_rows(into["value"]), used.mT, gradient, work.workspace)
    if tables.value_table is not None and "value_table" in into:
        part.collect_vectors(tables.value_table, part.collect(used, tables.value_table), gradient)
    if of_sums is None:
        softmax_backward_(scores_gradient, weights)
    else:
        # The gradient of a row's sum is its weights.
        delta = torch.linalg.vecdot(scores_gradient, weights) - of_sums.flatten(0, 1)
        scores_gradient.sub_(delta.unsqueeze(-1)).mul_(weights)
    if work.sums is not None:
        by_head = part.by_head(scores_gradient)
        sums = work.sums[part.heads.start : part.heads.stop, :, part.keys]
        sums += by_head[0] if len(by_head) == 1 else by_head.sum(0)
    if problem.query is not None and problem.key is not None:
        query, key, scale = part.query_rows(problem.query), part.key_rows(problem.key), problem.scale
        if "key" in into:
            put_product(part.key_rows(into["key"]), scores_gradient.mT, query, work.workspace, scale)
        if "query" in into:
            put_product(part.query_rows(into["query"]), scores_gradient, key, work.workspace, scale)
        if tables.key_table is not None:
            per_offset = part.collect(scores_gradient, tables.key_table).mul_(scale)
            if "query" in into:
                part.query_rows(into["query"]).add_(part.from_offsets(per_offset, tables.key_table))
            if "key_table" in into:
                part.collect_vectors(tables.key_table, per_offset, query)
    if work.item_factors is not None:
        query_factors, key_factors = (part.part_of(factors) for factors in work.item_factors)
        by_head = part.by_head(scores_gradient)
        if "query_factors" in into:
            part.add(into["query_factors"], by_head @ key_factors[:, :, part.keys])
        if "key_factors" in into:
            part.add(into["key_factors"][:, :, part.keys], by_head.mT @ query_factors)
    if work.item_dense is not None and "dense" in into:
        part.part_of(into["dense"])[..., part.keys] = part.by_head(scores_gradient)


class _Work:
    """A problem, with everything that its batch items have in common."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.workspace = Workspace(problem.value.device)
        whole = Piece(range(0), range(problem.n_q), range(problem.n_k), *problem.positions())
        self.tables = Tables(problem, whole)
        grid = self.tables.layout
        assert isinstance(grid, Grid)
        self.grid = grid
        self.m = torch.arange(problem.n_k) - grid.step * torch.arange(problem.n_q).unsqueeze(1)
        self.factors = self.item_factors = None
        if problem.query_factors is not None and problem.key_factors is not None:
            pair = problem.query_factors, problem.key_factors
            if all(len(factors) == 1 for factors in pair):
                self.factors = pair
            else:
                self.item_factors = pair
        self.dense = self.item_dense = None
        if problem.dense is not None and len(problem.dense) == 1:
            self.dense = problem.dense
        elif problem.dense is not None:
            self.item_dense = problem.dense
        self.common = [
            *(["bias"] if problem.bias is not None else []),
            *(["grid_bias"] if problem.grid_bias is not None else []),
            *(["query_factors", "key_factors"] if self.factors else []),
            *(["dense"] if self.dense is not None else []),
        ]
        self.sums: Tensor | None = None
        """The gradient of ``common_scores`` so far, (heads, n_q, n_k), where one is needed."""
        self.columns = {
            id(table): (self.m - table.window.start).clamp(0, len(table.window) - 1)
            for table in (self.tables.key_table, self.tables.value_table)
            if isinstance(table, GridVectors)
        }

    def parts(self) -> Iterator[_Part]:
        """Yield all pairs that may attend, some items and heads at a time."""
        heads = self.problem.value.shape[1]
        for piece in self.problem.pieces():
            groups = tuning.current().kept_tile_scores // (len(piece.queries) * len(piece.keys))
            for some, batches in cut(piece.batch, heads, groups):
                for batch in batches:
                    yield _Part(self, piece, batch, some)

    @cached_property
    def common_scores(self) -> Tensor | None:
        """What every item adds to its scores, (heads, n_q, n_k); None if nothing."""
        scores = []
        if isinstance(self.tables.bias, GridBias):
            scores.append(self.tables.bias.whole())
        if isinstance(self.tables.grid_bias, WrittenOutGrid):
            scores.append(self.tables.grid_bias.whole)
        if self.factors is not None:
            scores.append(self.factors[0][0] @ self.factors[1][0].mT)
        if self.dense is not None:
            scores.append(self.dense[0].to(self.problem.dtype))
        return sum(scores[1:], scores[0]) if scores else None

    def finish(self, into: dict[str, Tensor]) -> None:
        """Compute the gradients of what the items have in common, and those of the tables."""
        tables, grid = self.tables, self.grid
        if self.sums is not None and isinstance(tables.bias, GridBias) and "bias" in into:
            skewed = self.skewed(self.sums, slice(None), range(grid.low, grid.low + grid.count))
            tables.bias.sums += skewed.sum(1)
        if self.sums is not None and isinstance(tables.grid_bias, WrittenOutGrid) and "grid_bias" in into:
            tables.grid_bias.sums += self.sums
        for name, table in tables.by_name().items():
            if name in into:
                table.add_to(into[name])
        if self.sums is not None and self.factors is not None:
            if "query_factors" in into:
                torch.bmm(self.sums, self.factors[1][0], out=into["query_factors"][0])
            if "key_factors" in into:
                torch.bmm(self.sums.mT, self.factors[0][0], out=into["key_factors"][0])
        if self.sums is not None and self.dense is not None and "dense" in into:
            into["dense"].copy_(self.sums)

    def skewed(self, scores: Tensor, keys: slice, window: range) -> Tensor:
        """Arrange scores (groups, n_q, some keys) by m in ``window``: (groups, n_q, len(window)), zeros elsewhere."""
        step, n_q, n_k = self.grid.step, self.problem.n_q, self.problem.n_k
        # A row's diagonals reach this far beyond its keys; two neighboring rows share one margin.
        margin = max(0, -window.start, window.stop - 1 + step * (n_q - 1) - (n_k - 1))
        pitch = n_k + margin
        memory = self.workspace.zeros((len(scores) * n_q * pitch + margin,), scores.dtype)
        strides = n_q * pitch, pitch, 1
        memory.as_strided((len(scores), n_q, n_k), strides, margin)[:, :, keys] = scores
        shape = len(scores), n_q, len(window)
        return memory.as_strided(shape, (strides[0], pitch + step, 1), margin + window.start)


class _Part(Groups):
    """Some items and heads, and the keys that they may attend."""

    def __init__(self, work: _Work, piece: Piece, batch: range, heads: range) -> None:
        super().__init__(batch, heads, work.workspace)
        self.work, self.piece = work, piece
        self.keys = slice(piece.keys.start, piece.keys.stop)
        self.size = (self.groups, work.problem.n_q, len(piece.keys))

    def query_rows(self, tensor: Tensor) -> Tensor:
        """Return the part's queries, (groups, n_q, dim): a view if possible, as it is for contiguous memory."""
        return self.part_of(tensor).flatten(0, 1)

    def key_rows(self, tensor: Tensor) -> Tensor:
        """Return the part's keys, (groups, keys, dim): a view if possible."""
        return self.part_of(tensor).flatten(0, 1)[:, self.keys]

    def add(self, whole: Tensor, rows: Tensor) -> None:
        """Add (batch, heads, rows, dim) to its place in (1 or batch, heads, rows, dim)."""
        target = self.part_of(whole)
        target += rows if len(target) == len(rows) else rows.sum(0, keepdim=True)

    def weights(self, whole: Tensor) -> Tensor:
        """Return the part's (groups, n_q, keys) in the memory of the whole; it is contiguous."""
        groups, n_q, n_k = self.size
        return self.part_of(whole).flatten()[: groups * n_q * n_k].view(self.size)

    def fill_scores(self, scores: Tensor) -> None:
        """Write the part's scores."""
        work, problem, keys = self.work, self.work.problem, self.work.tables.key_table
        by_head = self.by_head(scores)
        common = work.common_scores
        if common is not None:
            common = common[self.heads.start : self.heads.stop, :, self.keys]
        if keys is not None and problem.query is not None:
            self.spread(self.per_offset(self.query_rows(problem.query), keys).mul_(problem.scale), keys, scores)
            if common is not None:
                by_head += common
        elif common is not None:
            by_head.copy_(common.expand_as(by_head))
        else:
            scores.zero_()
        if problem.query is not None and problem.key is not None:
            query, key = self.query_rows(problem.query), self.key_rows(problem.key)
            add_product(scores, query, key.mT, work.workspace, problem.scale)
        if work.item_factors is not None:
            query_factors, key_factors = (self.part_of(factors) for factors in work.item_factors)
            by_head += query_factors @ key_factors[:, :, self.keys].mT
        if work.item_dense is not None:
            by_head += self.part_of(work.item_dense)[..., self.keys]
        if self.piece.key_mask is not None:
            first = self.batch.start - self.piece.batch.start
            allowed = self.piece.key_mask[first : first + len(self.batch)]
            by_head.masked_fill_(~allowed[:, None, None], -torch.inf)

    def kept(self) -> Tensor | None:
        """Return the factors that dropout puts on the weights, (groups, n_q, keys); None without dropout."""
        problem = self.work.problem
        if problem.dropout_seeds is None:
            return None
        columns = torch.arange(self.keys.start, self.keys.stop)
        kept = keep_mask(self.query_rows(problem.dropout_seeds), columns, problem.dropout_p)
        return kept.to(problem.dtype) / (1.0 - problem.dropout_p)

    def spread(self, per_offset: Tensor, table: Vectors, scores: Tensor) -> None:
        """Write to each pair of ``scores`` its number from (groups, n_q, T)."""
        columns = self.work.columns[id(table)][:, self.keys]
        torch.gather(per_offset, -1, columns.expand_as(scores), out=scores)

    def collect(self, scores: Tensor, table: Vectors) -> Tensor:
        """Sum each query's scores by offset: (groups, n_q, T)."""
        assert isinstance(table, GridVectors)
        work, window = self.work, table.window
        if len(window) == 1:
            return scores.sum(-1, keepdim=True)
        with work.workspace.scope():
            # ``contiguous`` would return a view that is contiguous already, and that view would outlive its memory.
            per_offset = work.skewed(scores, self.keys, window).clone(memory_format=torch.contiguous_format)
        m, grid = work.m[:, self.keys], work.grid
        # The ends of the table also stand for all offsets beyond.
        if window.start > grid.low:
            per_offset[..., 0] += torch.linalg.vecdot(scores, (m < window.start).to(scores.dtype))
        if window.stop < grid.low + grid.count:
            per_offset[..., -1] += torch.linalg.vecdot(scores, (m >= window.stop).to(scores.dtype))
        return per_offset
