"""What ``results.json`` of a long training holds, whatever is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..runs.results import Results


@dataclass(frozen=True)
class TrainingPlan:
    """What is known before training.

    Args:
        parameters, embedding_parameters, positional_parameters: numbers of parameters, in all and of its parts.
        tokens_per_step: about.
        steps_per_epoch: how many steps read the whole text once.
        epochs: how often it is read.
    """

    parameters: int
    embedding_parameters: int
    positional_parameters: int
    tokens_per_step: int
    steps_per_epoch: float
    epochs: float


@dataclass(frozen=True)
class LossPoint:
    """The training loss after a step."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class TrainingResults(Results, TrainingPlan):
    """A training as far as it has come.

    Args:
        settings: all that decides the result.
        text: what is known about it.
        finished: whether it is over.
        step: how many steps were taken.
        tokens_seen: in these steps.
        seconds: that they took, in all runs.
        losses: of training, at some steps.
        held_out: "step" and the held-out scores after it.
    """

    FORMAT = 1
    INDENT = 1

    settings: dict[str, Any]
    text: Any
    finished: bool = False
    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    losses: list[LossPoint] = field(default_factory=list)
    held_out: list[dict[str, int | float]] = field(default_factory=list)

    @property
    def scores(self) -> dict[str, float]:
        """The last held-out scores."""
        return {name: value for name, value in self.held_out[-1].items() if name != "step"}
