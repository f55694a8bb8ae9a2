"""The contents of a pretraining's ``results.json``."""

from __future__ import annotations

from dataclasses import dataclass

from ...data.encode import TextFacts
from ...lab.training.results import TrainingPlan, TrainingResults


@dataclass(frozen=True)
class PretrainPlan(TrainingPlan):
    """Facts that are known before training."""

    block_lengths: list[int]
    """Length of a window in each block, in tokens."""


@dataclass(frozen=True, kw_only=True)
class PretrainResults(TrainingResults, PretrainPlan):
    """The results of a pretraining, finished or so far."""

    text: TextFacts
