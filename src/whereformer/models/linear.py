"""Linear layers after an activation that is computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.precision import autocasts
from ..kernels.torch_private import is_hooked
from ..kernels.tracing import is_plain

Activation = Callable[[Tensor], Tensor]


class _Activated(torch.autograd.Function):
    """``linear(activation(rows))`` that keeps only ``rows``: computing an activation again costs less than storing
    it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.activation = activation
        return functional.linear(activation(rows), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        twice = torch.is_grad_enabled()  # a second derivative is wanted
        with torch.enable_grad():
            activated = ctx.activation(rows)
        to_rows = None
        if needs_rows:
            (to_rows,) = torch.autograd.grad(activated, rows, gradient @ weight, create_graph=twice)
        return (
            to_rows,
            gradient.mT @ (activated if twice else activated.detach()) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
            None,
        )


def project(layer: nn.Module, hidden: Tensor, activation: nn.Module) -> Tensor:
    """Compute ``layer(activation(hidden))``, and the activation again in the backward where that is the same.

    It is the same for a plain :class:`torch.nn.Linear` that no adapter, quantizer or hook has replaced or watches.
    Compiled programs compute activations again by themselves.

    Args:
        layer: a linear layer, or whatever replaces it in a model.
        hidden: (..., in_features).
        activation: an elementwise module that runs before the layer.
    """
    if (
        type(layer) is not nn.Linear
        or is_watched(layer)
        or is_watched(activation)
        or next(activation.parameters(), None) is not None
        or not torch.is_grad_enabled()
        or not is_plain(hidden)
        or autocasts(hidden.device)
    ):
        out: Tensor = layer(activation(hidden))
        return out
    assert isinstance(layer, nn.Linear)
    activated: Tensor = _Activated.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), layer.weight, layer.bias, activation
    )
    return activated.reshape(*hidden.shape[:-1], layer.out_features)


def is_watched(module: nn.Module) -> bool:
    """Whether calling the module runs hooks, or a forward that is not its class's."""
    return is_hooked(module) or "forward" in vars(module)
