"""The "native" backend: attention on the CPU by one compiled kernel, in O(n) memory.

The kernel is attention.cpp beside this file; build.py compiles it and library.py loads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..fields import AXES, TABLES, Call, rows_axis
from ..operators import Again, Backend, Given, Operators, Results
from .arguments import DTYPES, INPUTS, Arguments, Backward, Kept, parts_of_backward
from .library import compute
from .library import why_not as why_no_library

poisons = False
"""Whether the kernel's scratch memory begins as NaN; for tests."""


def _is_empty(call: Call) -> bool:
    return 0 in (*call.value.shape[:3], call.n_q)


class Native(Backend):
    """What is kept are the parts of :class:`Kept`."""

    name, inputs = "native", INPUTS

    def why_not(self, call: Call, device: torch.device) -> str | None:
        if (reason := why_no_library()) is not None:
            return reason
        if device.type != "cpu":
            return f"needs tensors on the CPU, got {device.type}"
        if call.value.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"needs {names}, got {str(call.value.dtype).removeprefix('torch.')}"
        return super().why_not(call, device)

    def new_kept(self, call: Call) -> Tensor:
        return Kept.of(call, call.new_output()).whole

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Results, Again]:
        if _is_empty(call):
            output = call.new_output().zero_()
            kept = Kept.of(call, output)
            kept.whole.zero_()
            kept.log_sums[0] = -math.inf
            return _results(call.wants_lse, output, kept.whole), None
        arguments, wants_lse = Arguments(call, poison=poisons), call.wants_lse
        compute(arguments.data)
        results, fill = _results(wants_lse, *arguments.made), arguments.filling(call, tensors)
        if fill is None:
            return results, None
        return results, lambda *tensors: _results(wants_lse, *fill(tensors))

    def backward(
        self, call: Call, given: Given, needed: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Again]:
        if _is_empty(call):
            return [call.new_gradient(name).zero_() for name in needed], None
        parts = parts_of_backward(call, needed)
        into = _new_gradients(call, needed, parts)
        arguments = Arguments(call, Backward(given, into, parts), poison=poisons)
        compute(arguments.data)
        names, present = list(into), [name for name in AXES if getattr(call, name) is not None]
        places = [(name, present.index(name)) for name in needed]

        def finished(tensors: Sequence[Tensor], filled: Sequence[Tensor]) -> list[Tensor]:
            found = dict(zip(names, filled, strict=True))
            return [_finished(name, tensors[place], found.get(name)) for name, place in places]

        gradients = finished(tensors, arguments.made)
        # The kernel leaves out pairs of dense scores, so their memory has to begin as zeros.
        fill = None if "dense" in into else arguments.filling(call, tensors)
        if fill is None:
            return gradients, None
        return gradients, lambda *tensors: finished(tensors, fill(tensors))


def _results(wants_lse: bool, output: Tensor, kept: Tensor) -> Results:
    if not wants_lse:
        return output, kept, None
    sizes = output.shape[:3]
    return output, kept, kept[: 2 * sizes.numel()].view(2, *sizes).clone()


_TOGETHER = {"query_factors": "key_factors", "query_levels": "key_levels"}
"""The gradients that the kernel computes one beside the other."""


def _new_gradients(call: Call, needed: Sequence[str], parts: tuple[int, int]) -> dict[str, Tensor]:
    """Allocate what the kernel fills, by name."""
    batch_parts, row_parts = parts
    together = {one: other for pair in _TOGETHER.items() for one, other in (pair, pair[::-1])}
    gradients = {}
    for name in dict.fromkeys((*needed, *(together[name] for name in needed if name in together))):
        tensor: Tensor = getattr(call, name)
        size, dtype = tuple(tensor.shape), call.wide
        if name == "query":
            gradients[name] = call.new_gradient(name)
        elif name == "dense":
            gradients[name] = tensor.new_zeros(size, dtype=dtype)
        elif name in ("key", "value"):
            batch, heads, n_k, width = size
            dtype = dtype if row_parts > 1 else tensor.dtype
            gradients[name] = tensor.new_empty((row_parts, batch, n_k, heads, width), dtype=dtype).transpose(2, 3)
        elif name in TABLES:
            gradients[name] = tensor.new_empty((batch_parts, row_parts, call.heads, *size[1:]), dtype=dtype)
        elif size[3] > 0:
            rows = (call.value.shape[0], *size[1:])
            first = (row_parts,) if rows_axis(name) == "n_k" else ()
            gradients[name] = tensor.new_empty((*first, *rows), dtype=dtype)
    return gradients


def _finished(name: str, like: Tensor, found: Tensor | None) -> Tensor:
    """Return a gradient in the shape and dtype of its input, from the parts that the kernel filled."""
    if found is None:
        # Factors of rank 0
        return torch.zeros_like(like)
    if name in TABLES:
        found = _sum(found.flatten(0, 1))
    elif rows_axis(name) == "n_k":
        found = _sum(found)
    if len(like) < len(found):
        found = _sum(found).unsqueeze(0)
    return found.to(like.dtype)


def _sum(parts: Tensor) -> Tensor:
    """Sum over the first axis, one after another: any number of threads gives the same bits."""
    found = parts[0]
    for index in range(1, len(parts)):
        found = found + parts[index] if index == 1 else found.add_(parts[index])
    return found


backend = Native()
operators = Operators(backend)
