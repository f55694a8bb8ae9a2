"""float32 products on the CPU, through oneDNN where what PyTorch calls for them wastes half of the processor.

PyTorch leaves them to Intel's MKL, which uses 512-bit instructions on Intel's processors only. On AMD's that have them
oneDNN, which PyTorch also carries, is up to twice as fast. ``torch.backends.mkldnn.set_flags(False)`` leaves all of it
to MKL again.

Over many shapes it makes the process grow by gigabytes. So it is given few: sizes that follow the data have to be
regular (:func:`is_regular`), as those of batches of full length mostly are. Batches of any length are MKL's. (PyTorch's
own gelu goes through oneDNN for every shape, and grows with them, where ``set_flags(False)`` does not forbid it.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .. import tuning

Activation = Callable[[Tensor], Tensor]

SMALL = 64
"""Sizes up to which all are regular."""

NEAR = 2
"""How much smaller than a regular size others may be: n queries and n keys have 2 n - 1 offsets between them."""


def product_transposed(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right.T + bias`` of float32 on the CPU, through oneDNN; without a gradient.

    Args:
        left: (rows, inner).
        right: (columns, inner).
        bias: (columns,).
    """
    # With a gap between the right factor's rows it takes hundreds of times as long.
    if not (right.is_contiguous() or right.mT.is_contiguous()):
        right = right.contiguous()
    # A bias with gaps gives wrong numbers.
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(left) * right[0]


if hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    # Torch's counter of FLOPs would pass it over.
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_flops)


def is_regular(size: int) -> bool:
    """Whether a size is small, or a power of two or three times one, or next to that."""
    power = 1 << ((size + NEAR).bit_length() - 1)
    return size <= SMALL or size + NEAR - power <= NEAR or 0 <= size + NEAR - 3 * power // 2 <= NEAR


def by_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes products of this dtype, where they are not too small."""
    return (
        dtype == torch.float32
        and device.type == "cpu"
        and tuning.current().onednn
        and bool(torch.backends.mkldnn.enabled)
    )


def forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken, which our operators would silently leave out."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether a transform of functions or a forward-mode derivative is under way; what is our own knows neither."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_mode()


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``hidden @ weight.T + bias``, as :func:`torch.nn.functional.linear`, by the faster library.

    Args:
        hidden: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,).

    Returns:
        (..., out_features).
    """
    # Compiled and exported programs are left what their backends know.
    if torch.compiler.is_compiling() or not is_regular(math.prod(hidden.shape[:-1])):
        return functional.linear(hidden, weight, bias)
    return _of_any_size(hidden, weight, bias)


def _of_any_size(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, for a number of rows that may be any."""
    if not _suits(hidden, weight, bias):
        return functional.linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    out: Tensor = _Product.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.reshape(*hidden.shape[:-1], weight.shape[0])


def _suits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    return (
        hidden.numel() * weight.shape[0] >= tuning.FEWEST_IN_LAYERS
        # What broadcasts, or fits nothing, is torch's to compute or to refuse.
        and hidden.dim() > 1
        and weight.dim() == 2
        and hidden.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and all(
            # Subclasses (quantized, distributed, ...) have products of their own.
            by_onednn(tensor.dtype, tensor.device)
            and type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and not tensor.is_nested
            for tensor in tensors
        )
        and not torch.is_autocast_enabled("cpu")
        and not transforming()
        and not torch._C._get_tracing_state()
    )


class _Product(torch.autograd.Function):
    """The product of rows (n, in_features); its gradients are such products again, so they have gradients too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product_transposed(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(gradient, weight.mT) if needs_rows else None,
            _of_any_size(gradient.mT, rows.mT) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


class _Activated(torch.autograd.Function):
    """``linear(activation(rows))`` that keeps ``rows`` alone: an activation costs far less than its memory."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.activation = activation
        return linear(activation(rows), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        activated, to_rows, *_ = torch.func.vjp(ctx.activation, rows)
        product = _of_any_size if is_regular(len(rows)) else functional.linear
        return (
            to_rows(linear(gradient, weight.mT))[0] if needs_rows else None,
            product(gradient.mT, activated.mT) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
            None,
        )


def project(layer: nn.Module, hidden: Tensor, activation: nn.Module | None = None) -> Tensor:
    """``layer(hidden)``, or ``layer(activation(hidden))``, through :func:`linear` where that is the same.

    It is where the layer is a plain :class:`torch.nn.Linear` that nobody watches or has replaced, as adapters,
    quantizers and hooks do. What the activation makes is then not kept for the backward but made again, as compiled
    programs do by themselves.

    Args:
        layer: of a model.
        hidden: (..., in_features).
        activation: elementwise.
    """
    if type(layer) is not nn.Linear or torch.compiler.is_compiling() or is_watched(layer):
        out: Tensor = layer(hidden if activation is None else activation(hidden))
        return out
    assert isinstance(layer, nn.Linear)
    if activation is None:
        return linear(hidden, layer.weight, layer.bias)
    if (
        not torch.is_grad_enabled()
        or next(activation.parameters(), None) is not None
        or is_watched(activation)
        or torch.is_autocast_enabled(hidden.device.type)
        or transforming()
    ):
        return linear(activation(hidden), layer.weight, layer.bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    out = _Activated.apply(rows, layer.weight, layer.bias, activation)  # type: ignore[no-untyped-call]
    return out.reshape(*hidden.shape[:-1], layer.out_features)


def is_watched(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward, or another forward than its class's."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module) or torch.nn.modules.module._has_any_global_hook()
