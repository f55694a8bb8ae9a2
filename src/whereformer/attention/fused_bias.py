"""Calls with nothing but an ``OffsetBias`` on the CPU, by the kernels that torch's own attention has there.

Those take a bias of any strides. In reverse order of queries a table over offsets is a view with positive strides (a
Hankel matrix: row r column c reads entry r + c), so they read the table itself, as float32 beside bfloat16 too. They
give the gradients of query, key and value, not of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import tuning
from .pieces import Piece
from .problem import GRADIENTS, Problem
from .tables import GridBias, Tables, is_grid
from .tiles import Span
from .workspace import Workspace

LARGEST_BIAS = 2**8
"""Of a table whose gradients of query, key and value are torch's: its backward subtracts a row's norm from scores, and
the difference is as exact as the larger of the two."""


def trains(problem: Problem, device: torch.device) -> bool:
    """Whether torch's kernels compute forward and backward: no gradient but those of query, key and value is needed."""
    inputs = {name: tensor for name in GRADIENTS if (tensor := getattr(problem, name)) is not None}
    return (
        set(inputs) == {"query", "key", "value", "bias"}
        and not problem.has_gaps()
        and is_grid(*problem.positions())
        and _suits(problem, device)
        and problem.value.dtype in tuning.current().fused_backward_dtypes
        and torch.is_grad_enabled()
        and not inputs["bias"].requires_grad
        and any(tensor.requires_grad for tensor in inputs.values())
    )


def takes(problem: Problem, piece: Piece, tables: Tables) -> bool:
    """Whether torch's kernel computes the forward of a piece."""
    others = tables.keys, tables.values, problem.query_factors, problem.dense, piece.key_mask, piece.query_documents
    return (
        isinstance(tables.bias, GridBias)
        and all(other is None for other in others)
        and _suits(problem, problem.value.device)
    )


def _suits(problem: Problem, device: torch.device) -> bool:
    query, value = problem.query, problem.value
    return (
        query is not None
        and problem.seed is None
        # It would compute what causality forbids.
        and not problem.causal
        and device.type == "cpu"
        and value.dtype in tuning.current().fused_dtypes
        and query.shape[3] == value.shape[3]
    )


def new_norm(problem: Problem) -> Tensor:
    """Memory for the norm, (batch, heads, n_q), as torch's kernel has it."""
    batch, heads = problem.value.shape[:2]
    return problem.value.new_empty(batch, problem.n_q, heads, dtype=problem.dtype).transpose(1, 2)


def forward(problem: Problem, piece: Piece, tables: Tables, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """The outputs of a piece, and the logarithm of their sums of exponentials, the last query first."""
    bias = tables.bias
    assert isinstance(bias, GridBias)
    assert problem.query is not None
    assert problem.key is not None
    items, queries, keys = (slice(part.start, part.stop) for part in (piece.batch, piece.queries, piece.keys))
    query, key, value = (
        _readable(tensor[items, :, rows])
        for tensor, rows in ((problem.query, queries), (problem.key, keys), (problem.value, keys))
    )
    heads = range(value.shape[1])
    in_order = problem.keeps != "norm" and len(piece.queries) * len(piece.keys) <= tuning.current().unturned_scores
    if in_order:
        span = Span(range(len(piece.queries)), range(len(piece.keys)))
        view = bias.tiles(heads, len(piece.queries), workspace)(span)
    else:
        query, view = turned(query), bias.reversed_rows(heads)
    output, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=view.expand(len(query), -1, -1, -1), scale=problem.scale
    )
    if in_order:
        return output, norm
    # In the layout of the kernel's own output
    return turned(output.transpose(1, 2), 1).transpose(1, 2), norm


def is_exact(problem: Problem) -> bool:
    """Whether the table is small enough for torch's backward, finite numbers all."""
    assert problem.bias is not None
    return bool(problem.bias.abs().amax() <= LARGEST_BIAS) if problem.bias.numel() else True


def backward(
    problem: Problem, output_gradient: Tensor, output: Tensor, norm: Tensor, needed: Sequence[bool]
) -> list[Tensor]:
    """The gradients of query, key and value, as far as they are needed."""
    [piece] = problem.pieces()
    bias = Tables(problem, piece).bias
    assert isinstance(bias, GridBias)
    assert problem.query is not None
    query, key, value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _readable(turned(output_gradient)),
        _readable(turned(problem.query)),
        _readable(problem.key),
        _readable(problem.value),
        turned(output),
        norm,
        0.0,
        False,
        attn_mask=bias.reversed_rows(range(problem.value.shape[1])).expand(len(problem.value), -1, -1, -1),
        scale=problem.scale,
    )
    gradients = dict(zip(GRADIENTS, (turned(query), key, value), strict=False))
    return [gradients[name].contiguous() for name, need in zip(GRADIENTS, needed, strict=True) if need]


def _readable(rows: Tensor) -> Tensor:
    """The kernels take any strides but that within a row."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def turned(rows: Tensor, dim: int = 2) -> Tensor:
    """Rows in reverse order, a copy."""
    if rows.dtype == torch.bfloat16 and rows.stride(-1) == 1 and not rows.shape[-1] % 2:
        try:
            # In pairs, because torch's flip of 16-bit numbers is slow.
            return rows.view(torch.int32).flip(dim).view(rows.dtype)
        except RuntimeError:
            pass
    return rows.flip(dim)
