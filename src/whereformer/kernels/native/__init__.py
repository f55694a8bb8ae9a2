"""The "native" backend: attention on the CPU by one compiled kernel, in O(n) memory.

The kernel is attention.cpp beside this file; build.py compiles it and library.py loads it. This module has the
operators that autograd, the compiler and exported programs know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..logsums import LogSums
from ..precision import without_autocast
from ..problem import ARGUMENTS, GRADIENTS, Problem, register_gradients
from .again import Kind, attend_again, kind_of, remember
from .arguments import DTYPES, Arguments, Backward, Gradients, Kept, parts_of_backward, parts_of_forward
from .library import Native, found, library, why_not

__all__ = ["Kind", "attend", "attend_again", "kind_of", "unavailable", "why_not"]

poisons = False
"""Whether the kernel's scratch memory begins as NaN; for tests."""


def unavailable(call: Call, device: torch.device) -> str | None:
    """Return why this backend cannot take the call on that device; None if it can."""
    if (reason := why_not()) is not None:
        return reason
    if device.type != "cpu":
        return f"needs tensors on the CPU, got {device.type}"
    if call.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"needs {names}, got {str(call.dtype).removeprefix('torch.')}"
    return None


def attend(call: Call, kind: Kind | None = None) -> tuple[Tensor, LogSums | None]:
    """Compute attention, (batch, heads, n_q, value_dim) in the value's dtype, and ``LogSums`` if the call wants it.

    Args:
        call: the call.
        kind: its kind if it needs no gradient; it is remembered for ``attend_again``.
    """
    with without_autocast(call.value.device):
        problem = Problem.of(call)
        if kind is None:
            output, _, lse = _run(problem)
            return output, lse if call.return_lse else None
        output, kept, arguments = _run_kernel(problem, for_backward=False)
        if arguments is not None:
            remember(kind, call, problem, arguments, output, kept)
        return output, kept.log_sums if call.return_lse else None


def _compute(arguments: Arguments) -> None:
    handle = library()
    if handle is None:
        raise RuntimeError(f"the compiled kernel {why_not()}")
    code = handle.whereformer_attention(arguments.data)
    if code == 1:
        raise MemoryError("attention: no memory for the kernel's tiles")
    assert code == 0, "the library's struct is another"


def _level_for(dtype: torch.dtype) -> int:
    """Return the index of the instructions for calls of a dtype: the highest levels have bfloat16's products alone."""
    native = found()
    assert isinstance(native, Native)
    usable = native.levels[: native.levels.index(native.level) + 1]
    halves = [level for level in usable if level in ("avx512bf16", "amx")]
    if halves and dtype == torch.bfloat16:
        return native.levels.index(halves[-1])
    return native.levels.index(next(level for level in reversed(usable) if level not in halves))


def _is_empty(problem: Problem) -> bool:
    return 0 in (*problem.value.shape[:3], problem.n_q)


def _run_kernel(problem: Problem, for_backward: bool = True) -> tuple[Tensor, Kept, Arguments | None]:
    """Return the output, what is kept for the backward, and the kernel's arguments; None if there is nothing to do."""
    output, kept = problem.new_output(), Kept.of(problem, for_backward=for_backward)
    if _is_empty(problem):
        output.zero_()
        kept.whole.zero_()
        kept.log_sums[0] = -math.inf
        return output, kept, None
    level = _level_for(problem.value.dtype)
    arguments = Arguments(problem, output, kept, level, parts_of_forward(problem), poison=poisons)
    _compute(arguments)
    return output, kept, arguments


def _run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, what is kept for the backward, and ``LogSums`` if they are asked for."""
    problem = Problem(*arguments)
    output, kept, _ = _run_kernel(problem)
    return output, kept.whole, kept.log_sums.clone() if problem.wants_lse else problem.new_lse()


_forward = torch.library.custom_op(
    "whereformer::native_forward", _run_forward, mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    return problem.new_output(), Kept.of(problem).whole, problem.new_lse()


def _run_backward(
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    output: Tensor,
    kept: Tensor,
    needed: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    problem = Problem(*arguments)
    names = [name for name, need in zip(GRADIENTS, needed, strict=True) if need]
    if _is_empty(problem):
        return [gradient.zero_() for gradient in problem.new_gradients(needed)]
    parts = parts_of_backward(problem, names)
    into = _new_gradients(problem, names, parts)
    given = Backward(output_gradient, None if lse_gradient is None else lse_gradient.to(problem.dtype), into)
    level = _level_for(problem.value.dtype)
    _compute(Arguments(problem, output, Kept.of(problem, kept), level, parts, given, poison=poisons))
    return [_finished(problem, name, into) for name in names]


_backward = torch.library.custom_op(
    "whereformer::native_backward",
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


_BY_QUERY = ("key_table_factors", "query_factors", "query_levels")
_BY_KEY = ("query_table_factors", "key_factors", "key_levels")
"""The inputs with numbers for each query, or for each key, besides queries, keys and values."""


def _new_gradients(problem: Problem, needed: Sequence[str], parts: tuple[int, int]) -> Gradients:
    """Allocate what the kernel fills."""
    batch, heads, n_q, n_k = problem.value.shape[0], problem.heads, problem.n_q, problem.n_k
    batch_parts, row_parts = parts
    wide, value = problem.dtype, problem.value

    def of_table(name: str) -> Tensor | None:
        table: Tensor | None = getattr(problem, name)
        if name not in needed or table is None:
            return None
        return value.new_empty((batch_parts, row_parts, heads, *table.shape[1:]), dtype=wide)

    def of_keys(name: str, tensor: Tensor | None) -> Tensor | None:
        if name not in needed or tensor is None:
            return None
        return tensor.new_empty((row_parts, *tensor.shape), dtype=wide if row_parts > 1 else tensor.dtype)

    def of_rows(name: str, *together: str) -> Tensor | None:
        """Allocate the gradient of rows of factors or levels, also where the kernel computes it beside another's."""
        rows: Tensor | None = getattr(problem, name)
        if rows is None or rows.shape[3] == 0 or not any(each in needed for each in (name, *together)):
            return None
        first = (batch, heads, n_q) if name in _BY_QUERY else (row_parts, batch, heads, n_k)
        return value.new_empty((*first, rows.shape[3]), dtype=wide)

    dense = None
    if "dense" in needed and problem.dense is not None:
        dense = value.new_zeros(problem.dense.shape, dtype=wide)
    return Gradients(
        query=problem.new_query_gradient() if "query" in needed else None,
        key=of_keys("key", problem.key),
        value=of_keys("value", value),
        bias=of_table("bias"),
        key_table=of_table("key_table"),
        query_table=of_table("query_table"),
        value_table=of_table("value_table"),
        key_table_factors=of_rows("key_table_factors"),
        query_table_factors=of_rows("query_table_factors"),
        query_factors=of_rows("query_factors", "key_factors"),
        key_factors=of_rows("key_factors", "query_factors"),
        query_levels=of_rows("query_levels", "key_levels"),
        key_levels=of_rows("key_levels", "query_levels"),
        dense=dense,
    )


def _finished(problem: Problem, name: str, into: Gradients) -> Tensor:
    """Return a gradient in the shape and dtype of its input, from the parts that the kernel filled."""
    like: Tensor = getattr(problem, name)
    found: Tensor | None = getattr(into, name)
    if found is None:
        # Factors of rank 0
        return torch.zeros_like(like)
    if name in ("key", "value"):
        found = _sum(found)
    elif name in _BY_QUERY or name in _BY_KEY:
        found = found if name in _BY_QUERY else _sum(found)
        found = _sum(found).unsqueeze(0) if len(like) < len(found) else found
    elif name not in ("query", "dense"):
        found = _sum(found.flatten(0, 1))
        found = _sum(found).unsqueeze(0) if len(like) < len(found) else found
    return found.to(like.dtype)


def _sum(parts: Tensor) -> Tensor:
    """Sum over the first axis, one after another: any number of threads gives the same bits."""
    found = parts[0]
    for index in range(1, len(parts)):
        found = found + parts[index] if index == 1 else found.add_(parts[index])
    return found


_run = register_gradients(_forward, _backward, _run_forward, _run_backward)
