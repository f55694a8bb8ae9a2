"""Questions about tensors and sizes that are safe in compiled programs, where sizes may be symbols."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .torch_private import transforming


def is_plain(tensor: Tensor) -> bool:
    """Whether operations on a tensor run eagerly: no compiler, transform or subclass is in between."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling() and not transforming()


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
