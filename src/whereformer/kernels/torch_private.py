"""Every private name of torch that this package uses, each behind a function with a public name.

Nothing promises that they stay; torch 2.11, 2.12 and 2.13 have all of them. Only this module may name them, so a version of
torch that changes one is met here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import (  # type: ignore[attr-defined]
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    forward_ad,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


# --- what is under way


def forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken. ``forward_ad`` keeps its level to itself."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether a transform of ``torch.func`` or a forward-mode derivative is under way; no public function tells."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_mode()


def derivatives() -> int:
    """How many derivatives ``torch.func`` is taking, one of the other; no public function tells."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    kinds = torch._C._functorch.TransformType
    return sum(transform.key() in (kinds.Grad, kinds.Jvp) for transform in stack)


def constant_when_compiled(function: AnyFunction) -> AnyFunction:
    """As ``torch.compiler.assume_constant_result``, which imports the whole compiler to set this one attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The compiler knows to guard the transforms that it reads.
constant_when_compiled(derivatives)


# --- modules


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module runs hooks, its own or those of all modules; nothing public lists them."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or torch.nn.modules.module._has_any_global_hook()


# --- kernels of the CPU


def has_onednn_linear() -> bool:
    """Whether torch was built with :func:`onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """``left @ right.T + bias`` by oneDNN; the public ``linear`` takes MKL's product for float32."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found


def onednn_linear_operator() -> Any:
    """The operator itself, so that torch's counter of FLOPs can be told about it."""
    return torch.ops.mkldnn._linear_pointwise


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor, which nothing public says."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_amx() -> bool:
    """Whether the processor has tiles (AMX), which nothing public says."""
    return bool(torch.cpu._is_amx_tile_supported())


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, scale: float
) -> tuple[Tensor, Tensor]:
    """The kernel behind ``scaled_dot_product_attention`` on the CPU; the public function keeps the norm to itself.

    Returns:
        The output (batch, heads, n_q, head_dim), and the logarithm of each row's sum of exponentials,
        (batch, heads, n_q).
    """
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=attn_mask, scale=scale
    )
    return found


def cpu_attention_backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    norm: Tensor,
    *,
    attn_mask: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value that belong to :func:`cpu_attention`, for our own operator's backward."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        output_gradient, query, key, value, output, norm, 0.0, False, attn_mask=attn_mask, scale=scale
    )
    return found


def softmax_backward_(gradient: Tensor, weights: Tensor) -> None:
    """Turn the gradient of a softmax's weights over the last axis into that of its scores, in place.

    Autograd's own formula in one pass over memory; the public functions make a copy.
    """
    torch._softmax_backward_data(gradient, weights, -1, weights.dtype, grad_input=gradient)


# --- memory


def storage_id(tensor: Tensor) -> int:
    """A number that tensors share if they share memory; unlike ``data_ptr`` the meta device has it, too."""
    return tensor.untyped_storage()._cdata


def allocations(work: Callable[[], object]) -> list[int]:
    """What ``work`` allocates (bytes, negative where it frees) of the CPU's memory in this thread, in order.

    The public profiler has the same log, but writes lines to stderr that nobody asked for.
    """
    options = torch._C._profiler._ExperimentalConfig()
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, options))
    try:
        work()
    finally:
        threads = _disable_profiler_legacy()
    events = (event for thread in threads for event in thread)
    return [event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"]


# --- operations as torch dispatches them


class DispatchMode(TorchDispatchMode):
    """A context that sees every operation of torch that runs in it; only its module's name is private."""


def changes_arguments(operation: Any) -> bool:
    """Whether an operation of torch writes to what it is given; nothing public says so."""
    return bool(operation._schema.is_mutable)


def leaves(values: Any) -> list[Any]:
    """All that nested tuples, lists and dictionaries hold; torch has no public name for it."""
    return tree_leaves(values)
