"""The contents of a translation training's ``results.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...lab.training.results import TrainingPlan, TrainingResults


@dataclass(frozen=True)
class PairFacts:
    """Facts about pairs of lines.

    Args:
        pairs: number of pairs that are used.
        empty, too_long: number of pairs left out for these reasons.
        source_tokens, target_tokens: tokens in all, including the ends of lines.
        longest: tokens in the longest line.
    """

    pairs: int
    empty: int
    too_long: int
    source_tokens: int
    target_tokens: int
    longest: int


@dataclass(frozen=True)
class TranslationFacts:
    """Facts about the text: where it comes from, its two parts, and the size of the vocabulary."""

    source: str
    training: PairFacts
    held_out: PairFacts
    vocabulary: int


@dataclass(frozen=True)
class TranslationPlan(TrainingPlan):
    """Facts that are known before training, including the number of steps."""

    steps: int


@dataclass(frozen=True, kw_only=True)
class TranslationResults(TrainingResults, TranslationPlan):
    """The results of a translation training, finished or so far.

    Args:
        averaged: the averaged model's held-out scores, and "steps", the steps whose weights are averaged; None if the
            model is not an average.
    """

    text: TranslationFacts
    averaged: dict[str, Any] | None = None

    @property
    def scores(self) -> dict[str, float]:
        """The averaged model's held-out scores, or the last ones if there is no averaging."""
        if self.averaged is None:
            return super().scores
        return {name: value for name, value in self.averaged.items() if name != "steps"}

    def of_what(self) -> str:
        return f" (mean of {len(self.averaged['steps'])} checkpoints)" if self.averaged else ""
