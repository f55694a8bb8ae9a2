"""The short training loop that studies of small models share: AdamW, warm-up and decay, clipped gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError
from .training.optimizer import build_optimizer, build_schedule


class DivergedError(InputError):
    """A loss, or another number of a training, is not finite. It names ``learning_rate``."""

    @property
    def problem(self) -> str:
        """What is not finite, without the advice."""
        return self.reason.partition(";")[0]


@dataclass(frozen=True)
class Fitted:
    """A finished training: the loss of each step, and the seconds that all of them took."""

    losses: list[float]
    seconds: float


def fit(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    steps: int,
    learning_rate: float,
    *,
    warmup: int | None = None,
    what: str = "the loss",
    on_step: Callable[[float], None] = lambda loss: None,
) -> Fitted:
    """Train a model that returns its loss, one step for each batch.

    Args:
        model: the model, on the device where it is trained.
        batches: the arguments of the model for each step.
        steps: the number of batches.
        learning_rate: the peak. The rate rises to it in ``warmup`` steps, and then falls to zero at the last step.
        warmup: by default a tenth of the steps.
        what: what to call the loss in an error.
        on_step: is told the loss of each step.

    Raises:
        DivergedError: if the loss is not finite.
    """
    optimizer = build_optimizer(model, learning_rate)
    schedule = build_schedule(optimizer, "linear", tenth(steps) if warmup is None else warmup, steps)
    started = time.perf_counter()
    model.train()
    losses: list[float] = []
    for step, batch in enumerate(batches):
        loss = float(train_step(model, optimizer, batch))
        check_finite(what, loss, step, learning_rate)
        schedule.step()
        losses.append(loss)
        on_step(loss)
    return Fitted(losses, time.perf_counter() - started)


def tenth(steps: int) -> int:
    """Return the steps of the usual warm-up: a tenth of all, but at least one."""
    return max(1, steps // 10)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> Tensor:
    """Take one training step, with the gradient norm clipped to 1, and return the loss as a tensor on the device."""
    device = next(model.parameters()).device
    loss: Tensor = model(**{name: each.to(device) for name, each in batch.items()}).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check_finite(what: str, value: float, steps: int, learning_rate: float, advice: str = "") -> None:
    """Check that a loss or another number, which is called ``what``, is finite after so many steps.

    Raises:
        DivergedError: if it is not. It advises a quarter of the peak learning rate, and ``advice``.
    """
    if not math.isfinite(value):
        told = f"{what} is not finite (NaN or inf) after {steps} steps; {learning_rate:g} is too high, "
        raise DivergedError("learning_rate", f"{told}try {learning_rate / 4:g}{advice}")
