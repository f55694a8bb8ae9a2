"""The contents of ``results.json`` for measured properties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...analysis.properties import CurveShare, Growth, Reached, Shifted, Steps
from ...lab.score import Cannot
from ...lab.sheet import Sheet
from ...lab.store import RunResults
from ..compare.results import Score
from ..compare.settings import CompareSettings
from .report import build_markdown, build_report, sentences, sheets
from .ticks import Table


@dataclass(frozen=True)
class Measured:
    """All measurements of one method.

    Args:
        seed: the trained model's seed.
        reached, growth, curve, steps: as in :mod:`whereformer.analysis.properties`.
        shifted_fresh, shifted_trained: the shift of an untrained and of the trained model.
    """

    seed: int
    reached: Reached
    growth: Growth
    shifted_fresh: Shifted
    shifted_trained: Shifted
    curve: CurveShare
    steps: Steps


@dataclass(frozen=True)
class PropertiesResults(RunResults):
    """The measurements of a comparison's models, finished or so far, and the table.

    Args:
        settings: the comparison's settings.
        runs: the measurements of each method.
        text: facts about the text.
        thresholds: the thresholds that decide the ticks.
        losses: the comparison's held-out scores by method, seed and length, once everything is measured.
        table: the ticks of each requested method, by property.
    """

    FORMAT = "properties 1"
    KEYS = 1

    settings: CompareSettings
    runs: dict[str, Measured]
    text: dict[str, Any]
    thresholds: dict[str, Any]
    losses: dict[str, dict[int, dict[int, Score | Cannot]]] = field(default_factory=dict)
    table: Table = field(default_factory=dict)

    def sheets(self) -> Sequence[Sheet]:
        return sheets(self)

    def sentences(self) -> Sequence[str]:
        return sentences(self)

    def report(self) -> str:
        return build_report(self)

    def more_files(self) -> dict[str, str]:
        return {"results.md": build_markdown(self)}
