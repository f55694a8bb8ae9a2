"""Torch's own CPU kernels for calls whose only term is an ``OffsetBias``, and the gradient of its table.

These kernels take a bias with any strides. With the queries in reverse order, a table over offsets becomes a view with
positive strides (a Hankel matrix: row r, column c reads entry r + c), so they read the table itself; it may be float32
beside bfloat16. They return the gradients of query, key and value. This module computes that of a short table: its
inside from the band of scores that read it, and its ends from sums over whole rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import tuning
from ..problem import GRADIENTS, Problem
from ..torch_private import cpu_attention, cpu_attention_backward
from ..tracing import holds
from .matmul import add_product, put_product
from .onednn import onednn_suits
from .pieces import Piece
from .tables import GridBias, GridReader, Tables, is_grid
from .tiles import Scratch, Span, chunks
from .workspace import Workspace

LARGEST_BIAS = 2**8
"""The largest magnitude in a table whose gradients torch's backward may compute. It subtracts a row's norm from scores,
and the difference is only as exact as the larger of the two."""


def trains(problem: Problem, device: torch.device) -> bool:
    """Whether torch's kernels compute forward and backward, because the table is short or needs no gradient."""
    if not torch.is_grad_enabled():
        return False
    inputs = {name: tensor for name in GRADIENTS if (tensor := getattr(problem, name)) is not None}
    return (
        set(inputs) == {"query", "key", "value", "bias"}
        and not problem.has_gaps()
        and is_grid(*problem.positions())
        and _suits(problem, device, problem.n_q, problem.n_k)
        and problem.value.dtype in tuning.current().fused_backward_dtypes
        and (not inputs["bias"].requires_grad or _is_short(problem))
        and any(tensor.requires_grad for tensor in inputs.values())
    )


def _is_short(problem: Problem) -> bool:
    """Whether only few scores read the inside of the table."""
    assert problem.bias is not None
    sizes = tuning.current()
    share = sizes.half_band_share if problem.value.dtype.itemsize == 2 else sizes.band_share
    return holds(problem.bias.shape[1] + sizes.band_rows <= share * problem.n_k)


def takes(problem: Problem, piece: Piece, tables: Tables) -> bool:
    """Whether torch's kernel computes the forward of a piece."""
    others = (*tables.vectors(), problem.query_factors, problem.dense, problem.grid_bias)
    masks = (piece.key_mask, piece.query_documents)
    return (
        isinstance(tables.bias, GridBias)
        and all(other is None for other in (*others, *masks))
        and _suits(problem, problem.value.device, len(piece.queries), len(piece.keys))
        and tells_sums(problem)
    )


def tells_sums(problem: Problem) -> bool:
    """Whether the kernel's norm, which is one number, will do for the ``LogSums`` that a problem asks for, if any."""
    return not problem.wants_lse or is_exact(problem)


def _suits(problem: Problem, device: torch.device, n_q: int, n_k: int) -> bool:
    query, value = problem.query, problem.value
    return (
        query is not None
        and problem.seed is None
        # It would also compute the pairs that causality and the window forbid.
        and not problem.limits_offsets
        and problem.softcap is None
        and problem.heads == value.shape[1]
        and device.type == "cpu"
        and value.dtype in tuning.current().fused_dtypes
        and query.shape[3] == value.shape[3]
        # With oneDNN's products our own tiles are faster.
        and not onednn_suits(value.dtype, device, n_q, n_k, value.shape[3])
    )


def new_norm(problem: Problem) -> Tensor:
    """Allocate the norm, (batch, heads, n_q), in the layout of torch's kernel."""
    batch, heads = problem.value.shape[:2]
    return problem.value.new_empty(batch, problem.n_q, heads, dtype=problem.dtype).transpose(1, 2)


def forward(problem: Problem, piece: Piece, tables: Tables, workspace: Workspace) -> tuple[Tensor, Tensor, bool]:
    """Return the outputs of a piece, the log of their sums of exponentials, and whether that has the queries in their
    order; else the last one comes first."""
    bias = tables.bias
    assert isinstance(bias, GridBias)
    assert problem.query is not None
    assert problem.key is not None
    items, queries, keys = (slice(part.start, part.stop) for part in (piece.batch, piece.queries, piece.keys))
    query = _readable(problem.query[items, :, queries])
    key, value = (_readable(tensor[items, :, keys]) for tensor in (problem.key, problem.value))
    heads = range(value.shape[1])
    # With as many queries as keys, a table that is repeated for each query has about two numbers per score.
    repeated = len(piece.queries) * bias.grid.count
    in_order = problem.keeps != "norm" and repeated <= 2 * tuning.current().unturned_scores
    if in_order:
        span = Span(range(len(piece.queries)), range(len(piece.keys)))
        view = bias.reader(heads, workspace, len(piece.queries)).view(span)
    else:
        query, view = reversed_rows(query.transpose(1, 2), 1).transpose(1, 2), bias.reversed_rows(heads)
    output, norm = cpu_attention(query, key, value, attn_mask=view.expand(len(query), -1, -1, -1), scale=problem.scale)
    rows = output.transpose(1, 2)
    if not in_order:
        rows = reversed_rows(rows, 1)
    # The kernel's output has the query's layout; the operator's layout must always be the same, and no view.
    found = rows.contiguous().transpose(1, 2)
    found = found.new_empty(0).set_(found.untyped_storage(), found.storage_offset(), found.shape, found.stride())
    return found, norm, in_order


def is_exact(problem: Problem) -> bool:
    """Whether all numbers in the table are finite and small enough for torch's backward."""
    assert problem.bias is not None
    return bool(problem.bias.abs().amax() <= LARGEST_BIAS) if problem.bias.numel() else True


def backward(
    problem: Problem, output_gradient: Tensor, output: Tensor, norm: Tensor, needed: Sequence[bool]
) -> list[Tensor]:
    """Return the needed gradients of query, key, value and the table."""
    [piece] = problem.pieces()
    bias = Tables(problem, piece).bias
    assert isinstance(bias, GridBias)
    assert problem.query is not None
    assert problem.key is not None
    query, key, value = cpu_attention_backward(
        _readable(reversed_rows(output_gradient)),
        _readable(reversed_rows(problem.query)),
        _readable(problem.key),
        _readable(problem.value),
        reversed_rows(output),
        norm,
        attn_mask=bias.reversed_rows(range(problem.value.shape[1])).expand(len(problem.value), -1, -1, -1),
        scale=problem.scale,
    )
    gradients = {"query": reversed_rows(query), "key": key, "value": value}
    if needed[GRADIENTS.index("bias")]:
        gradients["bias"] = _TableGradient(problem, bias, output_gradient, output, norm.flip(2)).found()
    return [gradients[name].contiguous() for name, need in zip(GRADIENTS, needed, strict=True) if need]


class _TableGradient:
    """Computes the gradient of a short table, which sums the gradients of the scores that read each entry.

    If all scores of a rectangle read one end of the table, their gradients add up to ``weight * <output gradient, its
    output - the whole output>`` for each query, where ``weight`` is the rectangle's share of the query's attention.
    Torch's forward of the rectangle gives both. A query's gradients of scores add up to 0, so the remaining end gets
    what the others leave.
    """

    def __init__(self, problem: Problem, bias: GridBias, output_gradient: Tensor, output: Tensor, norm: Tensor) -> None:
        assert problem.query is not None
        assert problem.key is not None
        self.problem, self.bias, self.norm = problem, bias, norm
        self.query, self.key, self.value = (_readable(each) for each in (problem.query, problem.key, problem.value))
        self.gradient = output_gradient.to(problem.dtype)
        self.delta = torch.linalg.vecdot(output.to(problem.dtype), self.gradient)

    def found(self) -> Tensor:
        """Return the gradient, (heads, T)."""
        bias, sizes = self.bias, tuning.current()
        parts = chunks(range(self.problem.n_q), sizes.band_rows)
        self._add_left(parts, 0)
        spans = [span for queries in parts if (span := Span(queries, self._band(queries))).keys]
        workspace = Workspace(self.value.device)
        most = max((len(span.queries) * len(span.keys) for span in spans), default=1)
        for heads in chunks(range(self.value.shape[1]), max(1, sizes.tile_scores // most)):
            with workspace.scope():
                reader = bias.reader(heads, workspace)
                for span in spans:
                    with workspace.scope():
                        self._add_band(span, heads, reader, workspace)
        workspace.close()
        if self._band(parts[0]).stop < self.problem.n_k:
            bias.sums[:, -1] -= bias.sums.sum(1)
        gradient = torch.zeros_like(bias.table)
        bias.add_to(gradient)
        return gradient

    def _band(self, queries: range) -> range:
        """Return the keys outside which all these queries read one end of the table: the first left, the last right."""
        step, window, n_k = self.bias.grid.step, self.bias.window, self.problem.n_k
        start = min(max(window.start + step * queries.start, 0), n_k)
        return range(start, max(start, min(window.stop - 1 + step * (queries.stop - 1), n_k)))

    def _add_left(self, parts: list[range], first: int) -> None:
        """Add what is left of the bands of neighboring queries, from key ``first`` on, in the largest rectangles."""
        queries = range(parts[0].start, parts[-1].stop)
        stop = self._band(queries).start
        if stop > first:
            part, keys = slice(queries.start, queries.stop), slice(first, stop)
            output, norm = cpu_attention(
                self.query[:, :, part], self.key[:, :, keys], self.value[:, :, keys], scale=self.problem.scale
            )
            weight = (norm + self.bias.values[:, :1] - self.norm[:, :, part]).exp_()
            change = torch.linalg.vecdot(output.to(weight.dtype), self.gradient[:, :, part]) - self.delta[:, :, part]
            self.bias.sums[:, 0] += (weight * change).sum((0, 2))
        if len(parts) > 1:
            for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
                self._add_left(half, max(first, stop))

    def _add_band(self, span: Span, heads: range, reader: GridReader, workspace: Workspace) -> None:
        """Add the gradients of a band of scores to the table's gradient, by offset."""
        problem, some = self.problem, slice(heads.start, heads.stop)
        size = (len(heads), len(span.queries), len(span.keys))
        scratch = Scratch(workspace, *size, self.bias.grid.step, problem.dtype)
        weights = workspace.take(size, problem.dtype)
        rows, keys = slice(span.queries.start, span.queries.stop), slice(span.keys.start, span.keys.stop)

        def wide(tensor: Tensor, item: int, where: slice) -> Tensor:
            part = tensor[item, some, where]
            return part if part.dtype == problem.dtype else workspace.converted(part, problem.dtype)

        for item in range(len(self.value)):
            with workspace.scope():
                query, key = wide(self.query, item, rows), wide(self.key, item, keys)
                put_product(weights, query, key.mT, workspace, problem.scale)
                reader.add_to(weights.unsqueeze(0), span)
                weights.sub_(self.norm[item, some, rows].unsqueeze(-1)).exp_()
                tile = scratch.tile(len(heads), span)
                tile.scores.copy_(self.delta[item, some, rows].neg().unsqueeze(-1).expand_as(weights))
                value, gradient = wide(self.value, item, keys), wide(self.gradient, item, rows)
                add_product(tile.scores, gradient, value.mT, workspace)
                tile.scores.mul_(weights)
                self.bias.collect(tile, heads)


def _readable(rows: Tensor) -> Tensor:
    """Return rows with a contiguous last axis, the only strides that torch's kernels require."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def reversed_rows(rows: Tensor, dim: int = 2) -> Tensor:
    """Return a copy of rows in reverse order."""
    steps = rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1]
    if rows.dtype == torch.bfloat16 and rows.stride(-1) == 1 and not any(step % 2 for step in steps):
        # Flip pairs of numbers: torch's flip of 16-bit numbers is slow.
        return rows.view(torch.int32).flip(dim).view(rows.dtype)
    return rows.flip(dim)
