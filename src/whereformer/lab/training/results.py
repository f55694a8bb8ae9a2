"""The part of ``results.json`` that all long trainings share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..json_files import check_that
from ..store import FILE, Results


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

    def size(self, vocabulary: int) -> str:
        """Return the model's size in words."""
        return (
            f"{self.parameters:,} parameters, including {self.embedding_parameters:,} for embeddings of {vocabulary:,} "
            f"tokens and {self.positional_parameters:,} for position"
        )

    def passes(self) -> str:
        """Return how often the text is read, in words."""
        return f"the text takes {self.steps_per_epoch:,.1f} steps and is read {self.epochs:,.1f} times"


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

    def sentences(self) -> Sequence[str]:
        scores = ", ".join(score_text(name, value) for name, value in self.scores.items())
        took = f"{self.step:,} steps, {self.tokens_seen:,} tokens in {self.seconds:.0f} s"
        return (f"{took}; held-out {scores}{self.of_what()}",)

    def of_what(self) -> str:
        """Return what the scores are of, in brackets, unless they are of the last weights."""
        return ""

    def save(self, folder: Path | str) -> list[Path]:
        """Write ``results.json`` to a folder, unless it is there, and return what of the run is there.

        The model and the checkpoints are where they were trained.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        if not (path.exists() and type(self).load(path) == self):
            self.write(path)
        return [each for each in (folder / "model", folder / "checkpoints", path) if each.exists()]


def score_text(name: str, value: float) -> str:
    """Format a held-out score for people: accuracy and recall in percent."""
    shown = f"{value:.1%}" if name.endswith(("accuracy", "recall")) else f"{value:.3f}"
    return f"{name.replace('_', ' ')} {shown}"
