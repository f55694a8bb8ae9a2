"""The forward pass of "blockwise": it computes the output for some rows of scores at a time."""

from __future__ import annotations

import math

from torch import Tensor

from ..logsums import put_nothing
from ..problem import Problem
from . import fused_bias
from .block import TileBlock
from .matmul import put_product
from .plan import Plan, plans_of
from .tiles import Scratch, Span
from .workspace import Workspace


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output; what the backward needs, which is the rows' norm from torch's kernel or an empty tensor; and
    ``LogSums``."""
    workspace = Workspace(problem.value.device)
    plans = plans_of(problem)
    whole = len(plans) == 1 and not problem.has_gaps()
    lse = problem.new_lse()
    if (problem.keeps == "norm" and fused_bias.tells_sums(problem)) or (
        whole and fused_bias.takes(problem, plans[0].piece, plans[0].tables)
    ):
        output, norm, in_order = fused_bias.forward(problem, plans[0].piece, plans[0].tables, workspace)
        workspace.close()
        if problem.wants_lse:
            lse[0], lse[1] = norm if in_order else norm.flip(2), 0.0
        return output, norm if problem.keeps == "norm" else problem.value.new_empty(0), lse
    output = problem.new_output()
    if problem.has_gaps() or problem.limits_offsets:
        output.zero_()
        put_nothing(lse)
    for plan in plans:
        piece = plan.piece
        with workspace.scope():
            if fused_bias.takes(problem, piece, plan.tables):
                found, norm, in_order = fused_bias.forward(problem, piece, plan.tables, workspace)
                items, queries = (slice(part.start, part.stop) for part in (piece.batch, piece.queries))
                output[items, :, queries] = found
                if problem.wants_lse:
                    lse[0, items, :, queries], lse[1, items, :, queries] = norm if in_order else norm.flip(2), 0.0
            else:
                rows = PieceForward(plan, output, lse, workspace)
                for block in plan.blocks(workspace):
                    rows.run(block)
    workspace.close()
    # The backward does not use the norm beside biases so large that it is not here.
    return output, fused_bias.new_norm(problem) if problem.keeps == "norm" else problem.value.new_empty(0), lse


class PieceForward:
    """Computes the outputs of a piece, tile by tile."""

    def __init__(self, plan: Plan, output: Tensor, lse: Tensor, workspace: Workspace) -> None:
        self.plan, self.output, self.lse, self.workspace = plan, output, lse, workspace
        dtype, size = plan.problem.dtype, plan.size()
        self.weights = workspace.take((math.prod(size),), dtype)
        vectors = any(table is not None for table in plan.tables.vectors())
        self.scratch = Scratch(workspace, *size, plan.tables.step, dtype) if vectors else None

    def run(self, block: TileBlock) -> None:
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

    def _put_rows(self, block: TileBlock, span: Span, total: Tensor) -> None:
        """Write the outputs of some queries to ``total``, (groups, rows, value_dim)."""
        keys, values = block.tables.of_rows(span.queries)
        weights = block.tile_of(self.weights, span)
        sums = block.fill_weights(weights, span, keys, self.scratch, wants_lse=block.problem.wants_lse)
        if sums is not None:
            for row, found in zip(self.lse, sums, strict=True):
                block.rows_of(row, block.queries(span)).copy_(block.by_head(found))
        kept = block.kept(span)
        if kept is not None:
            weights *= kept
        factor = block.of_keys(block.factor(weights))
        put_product(block.of_keys(total), factor, block.value[:, block.in_keys(span)], self.workspace)
        if values is not None and self.scratch is not None:
            total += block.from_offsets(block.by_offset(weights, span, values, self.scratch), values)
