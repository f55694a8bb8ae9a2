"""What every training has in common: which weights decay, and how the learning rate goes up and down."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..positions import Position


def build_optimizer(
    model: nn.Module,
    learning_rate: float,
    kernel_learning_rate: float | None = None,
    *,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW that decays the backbone's matrices, and of position what a method names in ``decayed_parameters``.

    Args:
        model: whose parameters to train.
        learning_rate: of them.
        kernel_learning_rate: of what a method names in ``kernel_parameters`` (TISA's kernels), if another.
        weight_decay: of what decays.
        eps: Adam's.
    """
    positions = [module for module in model.modules() if isinstance(module, Position)]
    positional = {id(parameter) for position in positions for parameter in position.parameters()}
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1 and id(parameter) not in positional]
    decayed += [parameter for position in positions for parameter in position.decayed_parameters()]
    chosen = {id(parameter) for parameter in decayed}
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": weight_decay}]
    if kernel_learning_rate is not None:
        kernels = [parameter for position in positions for parameter in position.kernel_parameters()]
        chosen |= {id(parameter) for parameter in kernels}
        groups.append({"params": kernels, "weight_decay": 0.0, "lr": kernel_learning_rate})
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    groups.append({"params": others, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), eps=eps, fused=True)


def linear_schedule(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Up to the optimizer's learning rate in ``warmup`` steps, at least 1, then down to zero after ``steps``."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )


def inverse_sqrt_schedule(optimizer: torch.optim.Optimizer, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Up to the optimizer's learning rate in ``warmup`` steps, then down with the square root of the steps.

    Source: Vaswani et al. (2017), section 5.3.
    """
    warmup = max(1, warmup)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
    )
