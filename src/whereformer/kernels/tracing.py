"""Questions about tensors and sizes that are safe in compiled programs, where sizes may be symbols."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .torch_private import has_active_mode, is_transforming

CPU_IGNORES_ALIGNMENT = True
"""The compiled kernel for the CPU accepts any address; tests change this where CPU tensors stand in for a GPU's."""


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether operations on tensors run eagerly: no compiler, transform or subclass is in between."""
    types = (Tensor, nn.Parameter, type(None))
    plain_types = all(type(tensor) in types for tensor in tensors)
    return plain_types and not torch.compiler.is_compiling() and not is_transforming()


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether operations on tensors run eagerly, as in :func:`is_plain`, and no mode sees them. Compiled programs
    cannot ask about modes."""
    return is_plain(*tensors) and not has_active_mode()


def tensor_layouts(tensors: Sequence[Tensor]) -> tuple[object, ...] | None:
    """Return all that decides a kernel's arguments except addresses: dtypes, sizes, strides, devices and alignments.

    The result is None if the memory of a tensor does not have its numbers in rows: a part of a conjugate has the other
    sign there, and the zeros of forward-mode differentiation and tensors on "meta" have no memory.
    """
    layouts = []
    try:
        for tensor in tensors:
            address = tensor.data_ptr()
            if tensor.is_neg() or (address == 0 and tensor.numel()):
                return None
            # Triton compiles for addresses that 16 divides.
            alignment = None if tensor.is_cpu and CPU_IGNORES_ALIGNMENT else address & 15
            layouts.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device, alignment))
    except RuntimeError:  # sparse and nested tensors have no memory, or no strides
        return None
    return tuple(layouts)


def can_read(tensor: Tensor) -> bool:
    """Whether reading a tensor's numbers is cheap; on an accelerator it would stall the device."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def is_known_true(condition: bool) -> bool:
    """Whether a condition on sizes is true; in an exported program, whether it is true for every size that the program
    accepts.

    Compiled code is compiled again if another size gives another answer; an exported program cannot be.
    """
    if not torch.compiler.is_compiling():
        return condition
    # Imported here, because this import takes as long as importing this package.
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    return statically_known_true(condition) if torch.compiler.is_exporting() else guard_or_false(condition)


def are_static(*sizes: int) -> bool:
    """Whether all sizes are numbers and not symbols."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all(has_static_value(size) for size in sizes)
