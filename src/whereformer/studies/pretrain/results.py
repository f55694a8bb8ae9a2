"""The contents of a pretraining's ``results.json``."""

from __future__ import annotations

from dataclasses import dataclass

from ...lab.training.results import TrainingPlan, TrainingResults
from ...lab.training.text import TextFacts


@dataclass(frozen=True)
class PretrainPlan(TrainingPlan):
    """Facts that are known before training."""

    block_lengths: list[int]
    """Length of a window in each block, in tokens."""


@dataclass(frozen=True, kw_only=True)
class PretrainResults(TrainingResults, PretrainPlan):
    """The results of a pretraining, finished or so far."""

    text: TextFacts
