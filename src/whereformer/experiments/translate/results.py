"""What ``results.json`` of a translation training holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...training.results import TrainingPlan, TrainingResults


@dataclass(frozen=True)
class PairFacts:
    """What is known about pairs of lines.

    Args:
        pairs: how many are used.
        empty, too_long: how many were left out.
        source_tokens, target_tokens: in all, the ends of lines included.
        longest: tokens of the longest line.
    """

    pairs: int
    empty: int
    too_long: int
    source_tokens: int
    target_tokens: int
    longest: int


@dataclass(frozen=True)
class TranslationFacts:
    """What is known about the text."""

    source: str
    training: PairFacts
    held_out: PairFacts
    vocabulary: int


@dataclass(frozen=True)
class TranslationPlan(TrainingPlan):
    """What is known before training, the number of steps included."""

    steps: int


@dataclass(frozen=True, kw_only=True)
class TranslationResults(TrainingResults, TranslationPlan):
    """A translation training as far as it has come.

    Args:
        averaged: "steps", after which the weights are those that the model is the mean of, and the mean's held-out
            scores; None where the model is no mean.
    """

    text: TranslationFacts
    averaged: dict[str, Any] | None = None

    @property
    def scores(self) -> dict[str, float]:
        """The last held-out scores, or the mean model's."""
        if self.averaged is None:
            return super().scores
        return {name: value for name, value in self.averaged.items() if name != "steps"}
