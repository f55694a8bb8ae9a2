"""The operators of "blockwise": attention with terms in O(n) extra memory, in plain PyTorch, on any device.

Only some rows of scores exist at a time, in memory that is reused. A row has all of its keys, so its softmax is one
call. The backward recomputes the softmax instead of reading what the forward kept, so weights sum to one in both,
however large the scores are. (Torch's own kernels, see ``fused_bias``, get only small biases.) Scores and all sums over
many of them are float32 (or float64). As in torch's own attention, bfloat16 input is multiplied as bfloat16 only after
the softmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..logsums import LogSums
from ..precision import without_autocast
from ..problem import ARGUMENTS, Problem, register_gradients
from . import fused_bias, fused_windows, short
from .backward import backward
from .forward import forward
from .plan import plans_of


def attend(call: Call) -> tuple[Tensor, LogSums | None]:
    """Compute attention, (batch, heads, n_q, value_dim) in the value's dtype, and ``LogSums`` if the call wants it."""
    with without_autocast(call.value.device):
        problem = Problem.of(call)
        output, _, lse = _run(replace(problem, keeps=keeps(problem, problem.value.device)))
        return output, lse if problem.wants_lse else None


def keeps(problem: Problem, device: torch.device) -> str:
    """Return what the forward of a problem on that device keeps for the backward; see ``Problem``."""
    if short.takes(problem, device):
        return "weights"
    if fused_windows.takes(problem, device):
        return "norm of blocks"
    return "norm" if fused_bias.trains(problem, device) else "nothing"


def explain(call: Call) -> str:
    """Describe how this backend computes a call, for :func:`whereformer.explain`."""
    device = call.value.device
    # Explaining a call must not draw a dropout seed.
    with torch.random.fork_rng(devices=[]), without_autocast(device):
        problem = Problem.of(call)
        if short.takes(problem, device):
            return "{kind}: so few scores a head that training keeps their softmax"
        if fused_windows.takes(problem, device):
            return "torch's own kernels compute the window, block by block"
        if any(fused_bias.takes(problem, plan.piece, plan.tables) for plan in plans_of(problem)):
            return "{kind}: torch's own kernels read the table of offsets"
    return "tile by tile, in O(n) memory"


def _run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    with without_autocast(problem.value.device):
        if problem.keeps == "weights":
            return short.forward(problem)
        return fused_windows.forward(problem) if problem.keeps == "norm of blocks" else forward(problem)


_forward = torch.library.custom_op(
    "whereformer::blockwise_forward",
    _run_forward,
    mutates_args=(),
    schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    if problem.keeps == "weights":
        return short.new_output(problem), short.new_weights(problem), problem.new_lse()
    norm = problem.value.new_empty(0) if problem.keeps == "nothing" else fused_bias.new_norm(problem)
    return problem.new_output(), norm, problem.new_lse()


def _run_backward(
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    output: Tensor,
    kept: Tensor,
    needed: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    problem = Problem(*arguments)
    with without_autocast(problem.value.device):
        if problem.keeps == "weights":
            return short.backward(problem, output_gradient, lse_gradient, kept, needed)
        if problem.keeps == "norm of blocks":
            return fused_windows.backward(problem, output_gradient, output, kept, needed)
        if problem.keeps == "norm" and lse_gradient is None and fused_bias.is_exact(problem):
            return fused_bias.backward(problem, output_gradient, output, kept, needed)
        return backward(problem, output_gradient, lse_gradient, output, needed)


_backward = torch.library.custom_op(
    "whereformer::blockwise_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? lse_gradient, Tensor output, Tensor kept, bool[] needed, {ARGUMENTS}) "
    "-> Tensor[]",
)


@_backward.register_fake
def _(
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    output: Tensor,
    kept: Tensor,
    needed: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    return Problem(*arguments).new_gradients(needed)


_run = register_gradients(_forward, _backward, _run_forward, _run_backward)
