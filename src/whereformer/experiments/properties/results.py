"""What ``results.json`` of measured properties holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...analysis.properties import CurveShare, Growth, Reached, Steps
from ...runs.results import Results, refuse_other_settings
from ..compare.results import Cannot, CompareSettings, Score


@dataclass(frozen=True)
class Shift:
    """What moving a whole sequence changes, as :class:`whereformer.analysis.Shifted`; None for what is not finite."""

    scores: float | None
    output: float | None
    shifts: list[int]


@dataclass(frozen=True)
class Measured:
    """All that is measured of one method.

    Args:
        seed: of the trained model.
        reached, growth, curve, steps: as :mod:`whereformer.analysis.properties` has them.
        shifted_fresh, shifted_trained: of an untrained and of the trained model.
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
        holds: whether it has it; None if the measurement could not tell.
        number: what was measured, as it is shown under the tick.
        note: why it could not be measured, or what the number alone does not say.
        paper: the paper's tick; None for a method that it does not have.
        reason: why the two differ; empty if they don't.
    """

    holds: bool | None
    number: str
    note: str = ""
    paper: bool | None = None
    reason: str = ""

    @property
    def word(self) -> str:
        """Yes, no or open."""
        return "open" if self.holds is None else "yes" if self.holds else "no"

    @property
    def differs(self) -> bool:
        """Whether the paper says something else."""
        return None not in (self.holds, self.paper) and self.holds != self.paper


Losses = dict[str, dict[int, dict[int, Score | Cannot]]]
"""Held-out scores by method, seed and number of tokens that are read at a time."""


@dataclass(frozen=True)
class PropertiesResults(Results):
    """The measurements of one comparison's models as far as they have come, and the table.

    Args:
        settings: of the comparison.
        runs: what is measured of each method.
        text: facts to show.
        thresholds: by which ticks are given.
        losses: of the comparison, once all is measured.
        table: the ticks of each method that was asked for, by property.
    """

    FORMAT = "properties 1"

    settings: CompareSettings
    runs: dict[str, Measured]
    text: dict[str, Any]
    thresholds: dict[str, Any]
    losses: Losses = field(default_factory=dict)
    table: dict[str, dict[str, Tick]] = field(default_factory=dict)

    def with_run(self, position: str, run: Measured) -> PropertiesResults:
        """These results and a method's measurements."""
        return replace(self, runs={**self.runs, position: run})


def earlier_results(out: Path, settings: CompareSettings) -> PropertiesResults | None:
    """What an earlier run left in a folder.

    Raises:
        InputError: if the folder holds something else, or what was measured of another comparison.
    """
    found = PropertiesResults.load_if_there(out / "results.json")
    if found is not None:
        refuse_other_settings(out, asdict(found.settings), asdict(settings))
    return found
