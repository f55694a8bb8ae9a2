"""The part of ``results.json`` that all long trainings share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store import FILE, Results

if TYPE_CHECKING:
    from transformers import TrainerState


@dataclass(frozen=True)
class TrainingPlan:
    """Facts that are known before training starts."""

    parameters: int
    embedding_parameters: int
    positional_parameters: int
    tokens_per_step: int
    """Approximately."""
    steps_per_epoch: float
    """Number of steps that read the whole text once."""
    epochs: float
    """How many times training reads the text."""

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


def losses_of(state: TrainerState) -> list[LossPoint]:
    """Return the training losses that a Trainer logged."""
    return [LossPoint(log["step"], round(log["loss"], 4)) for log in state.log_history if "loss" in log]


@dataclass(frozen=True, kw_only=True)
class TrainingResults(Results, TrainingPlan):
    """The results of a training, finished or so far."""

    FORMAT = 1
    INDENT = 1

    settings: dict[str, Any]
    """Everything that decides the result."""
    text: Any
    """Facts about the text."""
    finished: bool = False
    step: int = 0
    """Steps taken so far, which ``tokens_seen`` and ``seconds`` are of, over all runs."""
    tokens_seen: int = 0
    seconds: float = 0.0
    losses: list[LossPoint] = field(default_factory=list)
    """The training loss at some of the steps."""
    held_out: list[dict[str, int | float]] = field(default_factory=list)
    """A "step" each, with the held-out scores after it."""

    @property
    def scores(self) -> dict[str, float]:
        """The last held-out scores."""
        return {name: value for name, value in self.held_out[-1].items() if name != "step"}

    def sentences(self) -> Sequence[str]:
        took = f"{self.step:,} steps, {self.tokens_seen:,} tokens in {self.seconds:.0f} s"
        return (f"{took}; held-out {score_texts(self.scores)}{self.of_what()}",)

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
        if not path.exists():
            self.write(path)
        return [each for each in (folder / "model", folder / "checkpoints", path) if each.exists()]


def score_texts(scores: Mapping[str, float]) -> str:
    """Format held-out scores for people: accuracy and recall in percent."""
    forms = {name: ".1%" if name.endswith(("accuracy", "recall")) else ".3f" for name in scores}
    return ", ".join(f"{name.replace('_', ' ')} {value:{forms[name]}}" for name, value in scores.items())
