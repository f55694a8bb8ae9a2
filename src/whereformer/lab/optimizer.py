"""The optimizer and the learning rate schedules of all trainings, and means of weights."""

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
    """Build AdamW with decay of the backbone's matrices.

    Position methods have none: it pulls parameters towards zero, where some methods add nothing and others still do.

    ``kernel_learning_rate`` is that of their ``kernel_parameters`` (such as TISA's kernels); None is ``learning_rate``.
    """
    positions = [module for module in model.modules() if isinstance(module, PositionMethod)]
    positional = {id(parameter) for position in positions for parameter in position.parameters()}
    matrices = [each for each in model.parameters() if each.dim() > 1 and id(each) not in positional]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": weight_decay}]
    if kernel_learning_rate is not None:
        kernels = [parameter for position in positions for parameter in position.kernel_parameters()]
        groups.append({"params": kernels, "weight_decay": 0.0, "lr": kernel_learning_rate})
    chosen = {id(parameter) for group in groups for parameter in group["params"]}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    groups.append({"params": others, "weight_decay": 0.0})
    return AdamW(groups, lr=learning_rate, betas=BETAS, eps=eps, fused=True)


def build_schedule(optimizer: Optimizer, name: str, warmup: int, steps: int) -> LambdaLR:
    """Return a schedule that rises to the rate in ``warmup`` steps, and goes on as :data:`SCHEDULES` say."""
    warmup, after = max(1, warmup), SCHEDULES[name]
    return LambdaLR(optimizer, lambda step: min((step + 1) / warmup, after(step, warmup, steps)))


def _cosine(step: int, warmup: int, steps: int) -> float:
    """Fall to zero along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "linear": lambda step, warmup, steps: (steps - step) / max(1, steps - warmup),
    "cosine": _cosine,
    "inverse_sqrt": lambda step, warmup, steps: (warmup / (step + 1)) ** 0.5,  # Vaswani et al. (2017), section 5.3
}
"""The share of the peak at a step after the warm-up. Arguments: step, steps of the warm-up, steps in all."""


class Averaged(nn.Module):
    """A model, with the sum of its weights at some steps of its training, which are in its state.

    So a checkpoint has all that the mean needs, and a training that continues ends with the same one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def forward(self, **inputs: Any) -> Any:
        """Return what the model returns."""
        return self.model(**inputs)

    @torch.no_grad()
    def add(self) -> None:
        """Add the weights of this step."""
        self.count += 1
        for name, weight in self.model.named_parameters():
            self.sums[name] = weight.double() + self.sums.get(name, 0)

    @torch.no_grad()
    def take_mean(self) -> None:
        """Give the model the mean of the weights that were added."""
        for name, weight in self.model.named_parameters():
            weight.copy_(self.sums[name] / self.count)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the weights."""
        return {"count": self.count, "sums": self.sums}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from what a checkpoint kept."""
        self.count, self.sums = state["count"], state["sums"]
