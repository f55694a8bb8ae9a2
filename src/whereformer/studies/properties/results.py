"""The contents of ``results.json`` for measured properties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...analysis.properties import CurveShare, Growth, Reached, Steps
from ...lab.score import Cannot
from ...lab.store import RunResults
from ..compare.results import Score
from ..compare.settings import CompareSettings

if TYPE_CHECKING:
    from ...lab.sheet import Sheet


@dataclass(frozen=True)
class Shift:
    """How scores and output change when all positions shift, as in :class:`whereformer.analysis.Shifted`.

    Values that are not finite are None.
    """

    scores: float | None
    output: float | None
    shifts: list[int]


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
    shifted_fresh: Shift
    shifted_trained: Shift
    curve: CurveShare
    steps: Steps


@dataclass(frozen=True)
class Tick:
    """One property of one method.

    Args:
        holds: whether the method has the property; None if the measurement could not tell.
        number: the measured number, as shown below the tick.
        note: why it could not be measured, or what the number does not show.
        paper: the paper's tick; None for a method that is not in the paper.
        reason: why the two differ; empty if they don't.
    """

    holds: bool | None
    number: str
    note: str = ""
    paper: bool | None = None
    reason: str = ""

    @property
    def word(self) -> str:
        """The tick in a word: yes, no or open."""
        return "open" if self.holds is None else "yes" if self.holds else "no"

    @property
    def differs(self) -> bool:
        """Whether the paper says otherwise."""
        return None not in (self.holds, self.paper) and self.holds != self.paper


Losses = dict[str, dict[int, dict[int, Score | Cannot]]]
"""Held-out scores by method, seed and length, in tokens read at a time."""


@dataclass(frozen=True)
class PropertiesResults(RunResults):
    """The measurements of a comparison's models, finished or so far, and the table.

    Args:
        settings: the comparison's settings.
        runs: the measurements of each method.
        text: facts about the text.
        thresholds: the thresholds that decide the ticks.
        losses: the comparison's losses, once everything is measured.
        table: the ticks of each requested method, by property.
    """

    FORMAT = "properties 1"
    KEYS = 1

    settings: CompareSettings
    runs: dict[str, Measured]
    text: dict[str, Any]
    thresholds: dict[str, Any]
    losses: Losses = field(default_factory=dict)
    table: dict[str, dict[str, Tick]] = field(default_factory=dict)

    def sheets(self) -> Sequence[Sheet]:
        from .report import sheets

        return sheets(self)

    def sentences(self) -> Sequence[str]:
        from .report import sentences

        return sentences(self)

    def report(self) -> str:
        from .report import build_report

        return build_report(self)

    def more_files(self) -> dict[str, str]:
        from .report import build_markdown

        return {"results.md": build_markdown(self)}
