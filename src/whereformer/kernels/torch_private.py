"""Every private name of torch that this package uses, each behind a function with a public name.

Torch may change them at any time; versions 2.11 to 2.13 have all of them. Only this module may use them, so only this
module has to follow when torch changes one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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


# --- the state of torch


def forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken; ``forward_ad`` keeps its level private."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether a transform of ``torch.func`` or a forward-mode derivative is running; no public function tells."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_mode()


def intercepted() -> bool:
    """Whether a mode sees every operator, such as the one that counts operations; no public function tells."""
    return torch._C._len_torch_dispatch_stack() > 0


def derivatives() -> int:
    """Return the number of nested derivatives that ``torch.func`` is taking; no public function tells."""
    stack = torch._C._functorch.get_interpreter_stack()
    if not stack:
        return 0
    kinds = torch._C._functorch.TransformType
    return sum(transform.key() in (kinds.Grad, kinds.Jvp) for transform in stack)


def constant_when_compiled(function: AnyFunction) -> AnyFunction:
    """Do what ``torch.compiler.assume_constant_result`` does, without importing the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The compiler guards the transforms that it reads by itself.
constant_when_compiled(derivatives)


def size_oblivious() -> AbstractContextManager[None]:
    """Let exported programs serve sizes of 0 and 1 too; torch has no public name for this option."""
    # Imported here, because this import takes as long as that of this whole package.
    import torch.fx.experimental._config as options

    found: AbstractContextManager[None] = options.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return found


# --- modules


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module runs hooks, its own or global ones; no public function lists them."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or torch.nn.modules.module._has_any_global_hook()


# --- kernels of the CPU


def has_onednn_linear() -> bool:
    """Whether torch was built with :func:`onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``left @ right.T + bias`` by oneDNN; the public ``linear`` uses MKL for float32."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found


def onednn_linear_operator() -> Any:
    """Return the operator itself, for registering its formula with torch's FLOP counter."""
    return torch.ops.mkldnn._linear_pointwise


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor; no public function tells."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_amx() -> bool:
    """Whether the processor has AMX tiles; no public function tells."""
    return bool(torch.cpu._is_amx_tile_supported())


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the kernel behind ``scaled_dot_product_attention`` on the CPU; the public function does not return the norm.

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
    """Return the gradients of query, key and value of :func:`cpu_attention`, for our own operator's backward."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        output_gradient, query, key, value, output, norm, 0.0, False, attn_mask=attn_mask, scale=scale
    )
    return found


def softmax_backward_(gradient: Tensor, weights: Tensor) -> None:
    """Turn the gradient of a softmax's weights over the last axis into that of its scores, in place.

    This is autograd's own formula in one pass over memory; the public functions make a copy.
    """
    torch._softmax_backward_data(gradient, weights, -1, weights.dtype, grad_input=gradient)


# --- memory


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors have in common if they share memory; unlike ``data_ptr`` it exists on "meta" too."""
    return tensor.untyped_storage()._cdata


def allocations(work: Callable[[], object]) -> list[int]:
    """Return what ``work`` allocates on the CPU in this thread, in order, in bytes; negative where it frees memory.

    The public profiler has the same log, but it writes unwanted lines to stderr.
    """
    options = torch._C._profiler._ExperimentalConfig()
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, options))
    try:
        work()
    finally:
        threads = _disable_profiler_legacy()
    events = (event for thread in threads for event in thread)
    return [event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"]


# --- dispatched operations


class DispatchMode(TorchDispatchMode):
    """A context that sees every torch operation that runs in it; only the name of its module is private."""


def changes_arguments(operation: Any) -> bool:
    """Whether a torch operation writes to its arguments; no public function tells."""
    return bool(operation._schema.is_mutable)


def leaves(values: Any) -> list[Any]:
    """Return all leaves of nested tuples, lists and dictionaries; torch has no public name for this."""
    return tree_leaves(values)


def checkpoints_reentrantly(layer: nn.Module) -> bool:
    """Whether a layer of transformers, whose checkpointing is on, uses torch's reentrant form, the default."""
    options: dict[str, Any] = getattr(layer._gradient_checkpointing_func, "keywords", {})
    return bool(options.get("use_reentrant", True))


def asserts(node: torch.fx.Node) -> bool:
    """Whether a node of an exported program asserts something about its sizes."""
    return node.target is torch.ops.aten._assert_scalar.default
