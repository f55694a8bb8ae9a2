"""The part of ``results.json`` that all long trainings share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..json_files import check_that
from ..store import Results


@dataclass(frozen=True)
class TrainingPlan:
    """Facts that are known before training starts.

    Args:
        parameters, embedding_parameters, positional_parameters: number of parameters, in all and of these parts.
        tokens_per_step: tokens that a step reads, approximately.
        steps_per_epoch: number of steps that read the whole text once.
        epochs: how many times training reads the text.
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
    """The results of a training, finished or so far.

    Args:
        settings: everything that decides the result.
        text: facts about the text.
        finished: whether training has finished.
        step: steps taken.
        tokens_seen: tokens read in these steps.
        seconds: time that they took, over all runs.
        losses: the training loss at some of the steps.
        held_out: a "step" each, with the held-out scores after it.
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

    def check(self) -> None:
        check_that(bool(self.held_out) or not self.finished, "held_out", "the scores of a finished training, got none")
        for number, point in enumerate(self.held_out):
            check_that("step" in point and len(point) > 1, f"held_out[{number}]", "a step and its scores")
            check_that(point.keys() == self.held_out[0].keys(), f"held_out[{number}]", "the scores of the first")

    @property
    def scores(self) -> dict[str, float]:
        """The last held-out scores."""
        return {name: value for name, value in self.held_out[-1].items() if name != "step"}
