"""Questions about tensors and sizes that are safe in compiled programs, where sizes may be symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .torch_private import observed, transforming


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether operations on tensors run eagerly: no compiler, transform or subclass is in between."""
    kinds = (Tensor, nn.Parameter, type(None))
    return all(type(each) in kinds for each in tensors) and not torch.compiler.is_compiling() and not transforming()


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether nothing but autograd would see operations on tensors: not even a mode, about which compiled programs
    cannot ask."""
    return is_plain(*tensors) and not observed()


def layouts_of(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return all but the numbers of tensors: what a compiled kernel's arguments follow from, but for the addresses.

    The result is None if one's memory does not have its numbers, or not in rows: a part of a conjugate has the other
    sign there, and the zeros of forward-mode differentiation and tensors on "meta" have no memory.
    """
    layouts = []
    try:
        for tensor in tensors:
            address = tensor.data_ptr()
            if tensor.is_neg() or (address == 0 and tensor.numel()):
                return None
            # Triton compiles for addresses that 16 divides; the compiled kernel for the CPU takes any.
            alignment = None if tensor.is_cpu else address & 15
            layouts.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device, alignment))
    except RuntimeError:  # sparse and nested tensors have no memory, or no strides
        return None
    return tuple(layouts)


def can_look(tensor: Tensor) -> bool:
    """Whether reading a tensor's numbers is cheap; on an accelerator it would stall the device."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def holds(condition: bool) -> bool:
    """Whether a condition on sizes holds; in an exported program, whether it holds for every size that the program
    takes.

    Compiled code is compiled again if another size gives another answer; an exported program cannot be.
    """
    if not torch.compiler.is_compiling():
        return condition
    # Imported here, because this import takes as long as that of this whole package.
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    return statically_known_true(condition) if torch.compiler.is_exporting() else guard_or_false(condition)


def are_numbers(*sizes: int) -> bool:
    """Whether all sizes are plain numbers rather than symbols."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all(has_static_value(size) for size in sizes)
