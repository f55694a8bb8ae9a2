"""Every private name of torch that this package uses, each behind a function with a public name; torch has none.

Torch may change them at any time; versions 2.11 to 2.15 have all of them. Only this module may use them, so only this
module has to follow when torch changes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # only its module is private
from torch.utils._pytree import tree_leaves

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., object])


def is_forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken; ``forward_ad`` keeps its level private."""
    return forward_ad._current_level >= 0


def is_transforming() -> bool:
    """Whether a transform of ``torch.func`` or a forward-mode derivative is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None or is_forward_mode()


def has_active_mode() -> bool:
    """Whether a transform or a forward-mode derivative is running, or a mode that sees every operator."""
    return torch._C._len_torch_dispatch_stack() > 0 or is_transforming()


def count_derivatives() -> int:
    """Return the number of nested derivatives that ``torch.func`` is taking; at least two in forward mode, which needs
    the same operators as a second derivative."""
    return 2 if is_forward_mode() else _count_func_derivatives()


def _count_func_derivatives() -> int:
    stack = torch._C._functorch.get_interpreter_stack()
    if not stack:
        return 0
    kinds = torch._C._functorch.TransformType
    return sum(transform.key() in (kinds.Grad, kinds.Jvp) for transform in stack)


@contextmanager
def recording() -> Iterator[None]:
    """Let autograd record operations in this context, also inside an operator, where torch switches that off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradOther):
        # The first key stands for all devices that torch knows.
        excluded = excluded - torch._C.DispatchKeySet(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def apply_without_transforms(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function's ``apply`` without the steps for transforms, which take an eighth of a short call."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def get_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; this number, which autograd checks, is private."""
    return tensor._version


def below_autograd() -> AbstractContextManager[object]:
    """Let operators compute without autograd; no public function does."""
    return torch._C._AutoDispatchBelowAutograd()


def constant_when_compiled(function: AnyFunction) -> AnyFunction:
    """Do what ``torch.compiler.assume_constant_result`` does, without importing the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The compiler guards the transforms that it reads by itself.
constant_when_compiled(_count_func_derivatives)


def bfloat16_levels() -> list[str]:
    """Return the instructions for bfloat16 that this processor has besides AVX-512 or NEON, and ask the system for the
    tiles of AMX, which a process has to do once."""
    if not torch.cpu._is_avx512_bf16_supported():
        has_neon = vars(torch.cpu).get("get_capabilities", dict)().get("bf16")  # older torch lacks it
        return ["neonbf16"] if has_neon else []
    return ["avx512bf16", "amx"] if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() else ["avx512bf16"]


def flatten_tree(values: object) -> list[Any]:
    """Return all leaves of nested tuples, lists and dictionaries."""
    return tree_leaves(values)


def checkpoints_reentrantly(layer: nn.Module) -> bool:
    """Whether a layer of transformers, whose checkpointing is on, uses torch's reentrant form, the default."""
    options: dict[str, object] = getattr(layer._gradient_checkpointing_func, "keywords", {})
    return bool(options.get("use_reentrant", True))
