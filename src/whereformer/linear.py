"""float32 products on the CPU, through oneDNN where what PyTorch calls for them wastes half of the processor.

PyTorch leaves them to Intel's MKL, which uses 512-bit instructions on Intel's processors only. On AMD's that have them
oneDNN, which PyTorch also carries, is up to twice as fast. ``torch.backends.mkldnn.set_flags(False)`` leaves all of it
to MKL again.
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
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

Activation = Callable[[Tensor], Tensor]

FEWEST = 2**22
"""Multiplications below which a call's own cost outweighs what is saved."""


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right.T + bias`` of float32 on the CPU, through oneDNN; without a gradient.

    Args:
        left: (rows, inner).
        right: (columns, inner).
        bias: (columns,).
    """
    # Rows with a gap between them it multiplies hundreds of times as slowly.
    if not (right.is_contiguous() or right.mT.is_contiguous()):
        right = right.contiguous()
    # It reads the bias as if it was contiguous.
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def _flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(left) * right[0]


if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    # Torch's counter of FLOPs would pass it over.
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_flops)


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
    """Whether large products of this dtype on this device are to go through oneDNN."""
    return (
        dtype == torch.float32 and device.type == "cpu" and onednn_is_faster() and bool(torch.backends.mkldnn.enabled)
    )


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
    out: Tensor = _Linear.apply(hidden.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return out.unflatten(0, hidden.shape[:-1])


def _suits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    return (
        hidden.numel() * weight.shape[0] >= FEWEST
        and hidden.dim() > 1
        and all(
            # Subclasses (quantized, distributed, ...) have products of their own.
            type(tensor) in (Tensor, nn.Parameter) and by_onednn(tensor.dtype, tensor.device)
            for tensor in tensors
        )
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    """The product of rows (n, in_features); its gradients are such products again, so they have gradients too."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(rows, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, weight, _ = inputs
        ctx.save_for_backward(rows, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(gradient, weight.mT) if needs_rows else None,
            linear(gradient.mT, rows.mT) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return torch.vmap(functional.linear, in_dims)(*inputs), 0


class _Activated(torch.autograd.Function):
    """``linear(activation(hidden))`` that keeps ``hidden`` alone: an activation costs far less than its memory."""

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return linear(activation(hidden), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        hidden, weight, _, ctx.activation = inputs
        ctx.save_for_backward(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        activated, to_hidden, *_ = torch.func.vjp(ctx.activation, hidden)
        return (
            to_hidden(linear(gradient, weight.mT))[0] if needs_hidden else None,
            linear(gradient.flatten(0, -2).mT, activated.flatten(0, -2).mT) if needs_weight else None,
            gradient.flatten(0, -2).sum(0) if needs_bias else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, activation = inputs

        def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return functional.linear(activation(hidden), weight, bias)

        return torch.vmap(plain, in_dims[:-1])(*tensors), 0


class Linear(nn.Linear):
    """:class:`torch.nn.Linear` through :func:`linear`."""

    def forward(self, hidden: Tensor, activation: Activation | None = None) -> Tensor:
        """Project hidden (..., in_features), or what the elementwise ``activation`` makes of it.

        The backward makes the activation again instead of keeping it, as compiled programs do by themselves.
        """
        if activation is None:
            return linear(hidden, self.weight, self.bias)
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(hidden.device.type):
            return linear(activation(hidden), self.weight, self.bias)
        out: Tensor = _Activated.apply(hidden, self.weight, self.bias, activation)  # type: ignore[no-untyped-call]
        return out
