"""What a comparison keeps of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A trained model.

    Args:
        rate: the peak of the learning rate.
        losses: the training loss of each step.
        scores: at each length, the held-out loss and the accuracy of tokens, or the reason why there is none.
        windows: the mean held-out loss of every 64 labels, at the training length.
        parameters: the number of parameters of position.
        flops: operations of a training step with windows of the full length, without norms and the like; None if torch
            can't count them.
        failed: why there is no model.
    """

    rate: float
    losses: list[float]
    scores: list[Any]
    windows: list[float]
    parameters: int
    flops: int | None
    failed: str = ""

    @property
    def loss(self) -> float:
        """The held-out loss at the training length."""
        return float(self.scores[0][0])
