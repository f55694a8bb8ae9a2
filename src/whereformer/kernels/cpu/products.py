"""Linear layers that use oneDNN on the CPU where it is faster; see ``onednn``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import tuning
from ..precision import autocasts
from ..torch_private import is_hooked, transforming
from .onednn import by_onednn, is_regular, product_transposed

Activation = Callable[[Tensor], Tensor]


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``hidden @ weight.T + bias`` like :func:`torch.nn.functional.linear`, with the faster library.

    Args:
        hidden: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,).

    Returns:
        (..., out_features).
    """
    # Compiled and exported programs keep the operator that their backends know.
    if torch.compiler.is_compiling() or not is_regular(math.prod(hidden.shape[:-1])):
        return functional.linear(hidden, weight, bias)
    return _of_any_size(hidden, weight, bias)


def _of_any_size(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`linear` for any number of rows, regular or not."""
    if not _suits(hidden, weight, bias):
        return functional.linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    out: Tensor = _Product.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.reshape(*hidden.shape[:-1], weight.shape[0])


def _suits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    return (
        hidden.numel() * weight.shape[0] >= tuning.FEWEST_IN_LAYERS
        # Torch computes shapes that broadcast, and refuses those that do not fit.
        and hidden.dim() > 1
        and weight.dim() == 2
        and hidden.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and all(
            # Subclasses (quantized, distributed, ...) define their own products.
            by_onednn(tensor.dtype, tensor.device)
            and type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and not tensor.is_nested
            for tensor in tensors
        )
        and not torch.is_autocast_enabled("cpu")
        and not transforming()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


class _Product(torch.autograd.Function):
    """The product of rows (n, in_features). Its gradients are such products too, so they have gradients."""

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
    """``linear(activation(rows))`` that keeps only ``rows``: computing an activation again costs less than storing
    it."""

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
    """Compute ``layer(hidden)``, or ``layer(activation(hidden))``, through :func:`linear` where that is the same.

    It is the same for a plain :class:`torch.nn.Linear` that no adapter, quantizer or hook has replaced or watches. The
    backward then computes the activation again instead of keeping its result, as compiled programs do by themselves.

    Args:
        layer: a linear layer, or whatever replaces it in a model.
        hidden: (..., in_features).
        activation: an elementwise module that runs before the layer.
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
        or autocasts(hidden.device)
        or transforming()
    ):
        return linear(activation(hidden), layer.weight, layer.bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    out = _Activated.apply(rows, layer.weight, layer.bias, activation)  # type: ignore[no-untyped-call]
    return out.reshape(*hidden.shape[:-1], layer.out_features)


def is_watched(module: nn.Module) -> bool:
    """Whether calling the module runs hooks, or a forward that is not its class's."""
    return is_hooked(module) or "forward" in vars(module)
