"""What is known of a call while a program is compiled, where sizes may be symbols and tensors have no numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .torch_private import transforming


def is_plain(tensor: Tensor) -> bool:
    """Whether operations on a tensor run at once, on its numbers: no compiler, transform or subclass is in between."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling() and not transforming()


def can_look(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read at little cost; on a device that would stall it."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def holds(condition: bool) -> bool:
    """Whether a condition on sizes holds; in a program that is exported, whether it holds for every size it takes.

    Code is compiled again where another size gives another answer; an exported program can't be.
    """
    if not torch.compiler.is_compiling():
        return condition
    # Not at the top, because it takes as long to import as all of this package.
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    return statically_known_true(condition) if torch.compiler.is_exporting() else guard_or_false(condition)


def are_numbers(*sizes: int) -> bool:
    """Whether sizes are plain numbers, no symbols."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all(has_static_value(size) for size in sizes)
