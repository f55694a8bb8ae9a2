"""The optimizer and the learning rate schedules of all trainings, and averages of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..positions import PositionMethod

BETAS = (0.9, 0.98)
"""Decay rates of Adam's two means."""


def build_optimizer(
    model: nn.Module,
    learning_rate: float,
    kernel_learning_rate: float | None = None,
    *,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
) -> AdamW:
    """Build AdamW, with weight decay for the backbone's matrices.

    Position methods have no weight decay: it pulls parameters towards zero, where only some methods have no effect.

    ``kernel_learning_rate`` is for their ``kernel_parameters`` (such as TISA's kernels); if None, ``learning_rate``.
    """
    positions = [module for module in model.modules() if isinstance(module, PositionMethod)]
    positional = {id(parameter) for position in positions for parameter in position.parameters()}
    matrices = [weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in positional]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": weight_decay}]
    if kernel_learning_rate is not None:
        kernels = [parameter for position in positions for parameter in position.kernel_parameters()]
        groups.append({"params": kernels, "weight_decay": 0.0, "lr": kernel_learning_rate})
    grouped = {id(parameter) for group in groups for parameter in group["params"]}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in grouped]
    groups.append({"params": rest, "weight_decay": 0.0})
    return AdamW(groups, lr=learning_rate, betas=BETAS, eps=eps, fused=True)


def build_schedule(optimizer: Optimizer, name: str, warmup: int, steps: int) -> LambdaLR:
    """Return a schedule that rises to the rate in ``warmup`` steps, and then falls by one of :data:`SCHEDULES`."""
    warmup, after = max(1, warmup), SCHEDULES[name]
    return LambdaLR(optimizer, lambda step: min((step + 1) / warmup, after(step, warmup, steps)))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "linear": lambda step, warmup, steps: (steps - step) / max(1, steps - warmup),
    "cosine": lambda step, warmup, steps: (
        0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
    ),
    "inverse_sqrt": lambda step, warmup, steps: (warmup / (step + 1)) ** 0.5,  # Vaswani et al. (2017), section 5.3
}
"""The share of the peak at a step after the warm-up. Arguments: step, steps of the warm-up, steps in all."""


class WeightAverage(nn.Module):
    """A model, and the sum of its weights at some steps of its training.

    The sum is part of the state, so a training that continues from a checkpoint ends with the same average.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def forward(self, **inputs: object) -> Any:
        """Return the model's output."""
        return self.model(**inputs)

    @torch.no_grad()
    def add(self) -> None:
        """Add the weights of this step."""
        self.count += 1
        for name, weight in self.model.named_parameters():
            self.sums[name] = weight.double() + self.sums.get(name, 0)

    @torch.no_grad()
    def take_mean(self) -> None:
        """Set the model's weights to the mean of the added ones."""
        for name, weight in self.model.named_parameters():
            weight.copy_(self.sums[name] / self.count)

    def get_extra_state(self) -> dict[str, object]:
        """Return the state that a checkpoint saves besides the weights."""
        return {"count": self.count, "sums": self.sums}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        self.count, self.sums = state["count"], state["sums"]
