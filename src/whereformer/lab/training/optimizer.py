"""The optimizer and learning rate schedules of all trainings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...positions import Position


def build_optimizer(
    model: nn.Module,
    learning_rate: float,
    kernel_learning_rate: float | None = None,
    *,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Build AdamW with weight decay on the backbone's matrices and on each position method's ``decayed_parameters``.

    Args:
        model: the model to train.
        learning_rate: the learning rate.
        kernel_learning_rate: a learning rate for ``kernel_parameters`` of position methods (such as TISA's kernels);
            None uses ``learning_rate``.
        weight_decay: the decay of the parameters with weight decay.
        eps: Adam's epsilon.
    """
    positions = [module for module in model.modules() if isinstance(module, Position)]
    positional = {id(parameter) for position in positions for parameter in position.parameters()}
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1 and id(parameter) not in positional]
    decayed += [parameter for position in positions for parameter in position.decayed_parameters()]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": weight_decay}]
    if kernel_learning_rate is not None:
        kernels = [parameter for position in positions for parameter in position.kernel_parameters()]
        groups.append({"params": kernels, "weight_decay": 0.0, "lr": kernel_learning_rate})
    chosen = {id(parameter) for group in groups for parameter in group["params"]}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    groups.append({"params": others, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), eps=eps, fused=True)


def linear_schedule(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Rise to the optimizer's learning rate in ``warmup`` steps (at least 1), then fall to zero at ``steps``."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )


def inverse_sqrt_schedule(optimizer: torch.optim.Optimizer, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Rise to the optimizer's learning rate in ``warmup`` steps, then fall with the inverse square root of the step.

    Source: Vaswani et al. (2017), section 5.3.
    """
    warmup = max(1, warmup)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
    )
