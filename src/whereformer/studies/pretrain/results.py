"""The contents of a pretraining's ``results.json``."""

from __future__ import annotations

from dataclasses import dataclass

from ...lab.training.results import TrainingPlan, TrainingResults
from ...lab.training.text import TextFacts


@dataclass(frozen=True)
class PretrainPlan(TrainingPlan):
    """Facts that are known before training.

    Args:
        block_lengths: length of a window in each block, in tokens.
    """

    block_lengths: list[int]


@dataclass(frozen=True, kw_only=True)
class PretrainResults(TrainingResults, PretrainPlan):
    """The results of a pretraining, finished or so far."""

    text: TextFacts
