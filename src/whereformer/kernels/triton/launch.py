"""The operators of ``backend="triton"``: flash attention with all terms fused in, in O(n) memory, on NVIDIA GPUs.

This module has the two custom operators and launches the forward kernel; ``backward`` launches the gradient kernels.
Torch computes what is cheap as matrix products over whole rows. The kernels are in ``jit``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..logsums import LogSums, put_nothing
from ..precision import without_autocast
from ..problem import ARGUMENTS, GRADIENTS, Problem, register_gradients
from ..terms import FactorPair, position_values
from .arguments import (
    at_rows,
    dropout_seeds_of,
    inputs_of,
    new_norm,
    new_rows,
    norm_of,
    pairs_of,
    parts_of,
    row_matrix,
    shared_by,
    terms_of,
)
from .backward import Backward
from .blocks import blocks_of, cdiv


def attend(call: Call) -> tuple[Tensor, LogSums | None]:
    """Compute attention, (batch, heads, n_q, value_dim) in the value's dtype, and ``LogSums`` if the call wants it."""
    with without_autocast(call.value.device):
        problem = Problem.of(call)
        changes: dict[str, Any] = {}
        if problem.scale <= 0:
            # The kernels take the largest product of a row for that of its largest score.
            changes["scale"] = -problem.scale or 1.0
            changes["query"] = None if problem.query is None else problem.query * (-1 if problem.scale else 0)
        if problem.query_positions is not None or problem.key_positions is not None:
            # The kernels take both sequences' positions as affine, or both as tensors.
            tables = (problem.bias, problem.key_table, problem.query_table, problem.value_table)
            matter = problem.limits_offsets or any(table is not None for table in tables)
            for name, positions in (("query", call.query_positions), ("key", call.key_positions)):
                changes[f"{name}_positions"] = position_values(positions, call.value.device) if matter else None
        if any(each is not None for each in (problem.key_factors, problem.key_levels, problem.query_table)):
            changes |= _with_a_key_for_each_head(problem)
        if problem.query_table is not None and problem.query_table_factors is None:
            # By the call's own scale, whatever its sign.
            changes["query_table_factors"] = changes["key"].float() * problem.scale
        if problem.query_factors is not None and problem.key_factors is not None:
            rank, dtype = problem.query_factors.shape[3], _factors_dtype(call)
            changes["query_factors"] = problem.query_factors.to(dtype) if rank else None
            changes["key_factors"] = problem.key_factors.to(dtype) if rank else None
        out, _, lse = _run(replace(problem, **changes) if changes else problem)
        return out, lse if call.return_lse else None


def _with_a_key_for_each_head(problem: Problem) -> dict[str, Tensor | None]:
    """Repeat keys and values that heads share: what else keys have differs from head to head."""
    shared = shared_by(problem)
    kept = {"key": problem.key, "value": problem.value}
    return {
        name: tensor if tensor is None or shared == 1 else tensor.repeat_interleave(shared, 1)
        for name, tensor in kept.items()
    }


def _factors_dtype(call: Call) -> torch.dtype:
    """Return the dtype of factors in kernels: the value's if all came in it, which only changes the speed."""
    pairs = [term for term in call.terms if isinstance(term, FactorPair)]
    came = {factors.dtype for pair in pairs for factors in (pair.query_factors, pair.key_factors)}
    return call.value.dtype if came == {call.value.dtype} else torch.float32


def _run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and its norm, (1 or 2, batch, heads, n_q): the fields of the kernels' ``Norm``."""
    problem = Problem(*arguments)
    out, norm = _empty_output(problem)
    if out.numel() == 0 or problem.n_k == 0:
        lse = problem.new_lse()
        put_nothing(lse)
        return out.zero_(), norm.fill_(math.inf), lse
    with torch.no_grad(), without_autocast(out.device), _on(out.device):
        dropout_seeds = dropout_seeds_of(problem)
        for part, rows in parts_of(problem):
            seeds_of_part = None if dropout_seeds is None else dropout_seeds[:, :, rows].contiguous()
            part_norm = norm if part is problem else new_norm(out, len(norm), problem.heads, part.n_q)
            _fill(part, seeds_of_part, at_rows(out, rows), part_norm)
            if part is not problem:
                norm[..., rows] = part_norm
    return out, norm, _lse_of(norm) if problem.wants_lse else problem.new_lse()


_forward = torch.library.custom_op(
    "whereformer::triton_forward", _run_forward, mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    return *_empty_output(problem), problem.new_lse()


def _lse_of(norm: Tensor) -> LogSums:
    """Return the logs of the rows' sums of exponentials, whose norm is in units of log2."""
    shift = norm[0] * math.log(2)
    empty = shift.isposinf()
    log_sum = norm[1] * math.log(2) if len(norm) > 1 else torch.zeros_like(shift)
    return torch.stack([shift.masked_fill(empty, -math.inf), log_sum.masked_fill(empty, 0.0)])


def _empty_output(problem: Problem) -> tuple[Tensor, Tensor]:
    """Allocate the output, in the layout that suits the projection after it, and its norm."""
    may_be_large = any(
        term is not None for term in (problem.bias, problem.query_factors, problem.query_levels, problem.dense)
    )
    norm = new_norm(problem.value, 2 if may_be_large else 1, problem.heads, problem.n_q)
    return problem.new_output(), norm


def _run_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, norm: Tensor, needed: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    problem = Problem(*arguments)
    gradients = _empty_gradients(problem, needed)
    if out.numel() == 0 or problem.n_k == 0:
        return [gradient.zero_() for gradient in gradients.values()]
    with torch.no_grad(), without_autocast(out.device), _on(out.device):
        Backward(problem, d_out, d_lse, out, norm, gradients).run()
    return list(gradients.values())


_backward = torch.library.custom_op(
    "whereformer::triton_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor norm, bool[] needed, {ARGUMENTS}) -> Tensor[]",
)


@_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, norm: Tensor, needed: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    return list(_empty_gradients(Problem(*arguments), needed).values())


def _empty_gradients(problem: Problem, needed: Sequence[bool]) -> dict[str, Tensor]:
    """Allocate the needed gradients, in the layout of their inputs."""
    names = (name for name, wanted in zip(GRADIENTS, needed, strict=True) if wanted)
    return {name: torch.empty_like(getattr(problem, name)) for name in names}


_run = register_gradients(_forward, _backward, _run_forward, _run_backward)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current device, because Triton launches on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _fill(problem: Problem, dropout_seeds: Tensor | None, out: Tensor, norm: Tensor) -> None:
    """Fill ``out``, (batch, heads, n_q, value_dim) with any strides, and a norm of :func:`new_norm`."""
    # Imported here, because it imports Triton.
    from .jit.forward import forward

    batch, heads = problem.value.shape[0], problem.heads
    blocks = blocks_of("forward", problem)
    at_offset = values = None
    if problem.value_table is not None:
        at_offset = new_rows(out, heads, problem.n_q, problem.value_table.shape[1])
        # Weights are rounded to the values' dtype too, so that tensor cores multiply them.
        values = problem.value_table.to(problem.value.dtype).unsqueeze(0).expand(batch, heads, -1, -1)
    forward[(batch * heads * cdiv(problem.n_q, blocks.rows),)](
        inputs_of(problem),
        row_matrix(out),
        norm_of(norm),
        row_matrix(values),
        at_offset,
        terms_of(problem),
        pairs_of(problem, dropout_seeds),
        **blocks.launch,
    )
