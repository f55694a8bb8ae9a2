"""What ``results.json`` of a pretraining holds."""

from __future__ import annotations

from dataclasses import dataclass

from ...training.results import TrainingPlan, TrainingResults
from ...training.text import TextFacts


@dataclass(frozen=True)
class PretrainPlan(TrainingPlan):
    """What is known before training.

    Args:
        block_lengths: tokens of a window in each block.
    """

    block_lengths: list[int]


@dataclass(frozen=True, kw_only=True)
class PretrainResults(TrainingResults, PretrainPlan):
    """A pretraining as far as it has come."""

    text: TextFacts
