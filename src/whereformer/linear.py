"""float32 products on the CPU, through oneDNN where what PyTorch calls for them wastes half of the processor.

PyTorch leaves them to Intel's MKL, which uses 512-bit instructions on Intel's processors only. On AMD's that have them
oneDNN, which PyTorch also carries, is up to twice as fast. ``torch.backends.mkldnn.set_flags(False)`` leaves all of it
to MKL again.

OneDNN makes and keeps a program for every shape that it multiplies, which over many shapes adds up to gigabytes. So it
is given few: sizes that follow the data are cut into :func:`regular` ones, and what is left over is MKL's.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, register_flop_formula

Activation = Callable[[Tensor], Tensor]

FEWEST = 2**22
"""Multiplications below which a call's own cost outweighs what is saved."""


SMALL = 64
"""Sizes up to which all are few enough."""


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


def regular(size: int) -> int:
    """The largest power of two, or three times one, that is at most ``size`` (1 or more)."""
    power = 1 << (size.bit_length() - 1)
    return power + power // 2 if size >= power + power // 2 else power


def _cut(size: int) -> list[int]:
    """A size as at most two regular ones, and what is left over."""
    if size <= SMALL:
        return [size, 0, 0]
    first = regular(size)
    second = regular(size - first) if size - first >= SMALL else 0
    return [first, second, size - first - second]


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """``left @ right.T + bias`` from products of few shapes, whatever the number of rows and the inner size."""
    rows, inner = _cut(left.shape[0]), _cut(left.shape[1])
    if not any(rows[1:] + inner[1:]):
        return product_transposed(left, right, bias)
    out = left.new_empty(left.shape[0], right.shape[0])
    for row, (part, target) in enumerate(zip(left.split(rows), out.split(rows), strict=True)):
        for place, (mine, other) in enumerate(zip(part.split(inner, 1), right.split(inner, 1), strict=True)):
            if not mine.numel():
                continue
            if row < 2 and place < 2:
                found = product_transposed(mine, other, bias if place == 0 else None)
                target.copy_(found) if place == 0 else target.add_(found)
            elif place == 0:
                torch.mm(mine, other.mT, out=target) if bias is None else torch.addmm(bias, mine, other.mT, out=target)
            else:
                target.addmm_(mine, other.mT)
    return out


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Whether this is an AMD processor with 512-bit instructions, and PyTorch has oneDNN's product."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        vendor = Path("/proc/cpuinfo").read_text()
    except OSError:
        vendor = platform.processor()
    return "AuthenticAMD" in vendor


def by_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes products of this dtype, where they are not too small."""
    return (
        dtype == torch.float32 and device.type == "cpu" and onednn_is_faster() and bool(torch.backends.mkldnn.enabled)
    )


def transforming() -> bool:
    """Whether a transform of functions or a forward-mode derivative is under way; what is our own knows neither."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


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
    if torch.compiler.is_compiling() or not _suits(hidden, weight, bias):
        return functional.linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    out: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.reshape(*hidden.shape[:-1], weight.shape[0])


def _suits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    return (
        hidden.numel() * weight.shape[0] >= FEWEST
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


class _Linear(torch.autograd.Function):
    """The product of rows (n, in_features); its gradients are such products again, so they have gradients too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(gradient, weight.mT) if needs_rows else None,
            linear(gradient.mT, rows.mT) if needs_weight else None,
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
        return (
            to_rows(linear(gradient, weight.mT))[0] if needs_rows else None,
            linear(gradient.mT, activated.mT) if needs_weight else None,
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
