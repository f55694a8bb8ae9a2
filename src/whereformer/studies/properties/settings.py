"""The options of measured properties. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from ...lab.options import MOST_JOBS, Seeds, TextOptions, check_range, listed
from ...lab.study import Study, default
from ..compare.settings import Compare

if TYPE_CHECKING:
    from .run import PropertiesJob

DEFAULT_STEPS = 800
QUICK_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class Properties(Seeds, TextOptions, Study):
    """Which properties does each position method have? Table 1 of the TISA paper, measured instead of claimed.

    The command answers six questions about every method. Can it read text longer than its training text (inductive)? Do
    gradients reach its parameters (data-driven)? Are there few, and does their number not grow (parameter efficient)?
    Does a common shift of all positions leave the output unchanged (translation invariant)? Does the longest chain of
    operations not grow with the length (parallelizable)? Is its effect on the scores a curve over offsets
    (interpretable)? A threshold, which the output states, decides each tick. Where a tick differs from the paper's, the
    output says why.

    The command trains a small encoder for each method, as `whereformer compare` does, in about ten minutes on two cores
    (almost half of that for floater), or uses the models of a finished comparison. With several seeds, medians decide
    "inductive", and the rest is measured with the first. Writes results.json, results.md and report.html. After an
    interruption, the same command does the rest.
    """

    positions: str | None = None
    """Methods to judge, separated by commas. "a+b" uses both at once. Default: every method, or all that --results
    has."""

    results: Path | None = None
    """The folder of a finished `whereformer compare`, whose losses and models are used instead of training."""

    out: Path = Path("runs/properties")
    """Folder for the results."""

    quick: bool = False
    """Take a first look in about two minutes. Methods then learn little that longer text could spoil."""

    length: int | None = None
    """Tokens in a training window. The longer text has four times this length. Default: 64."""

    steps: int | None = None
    """Training steps of each method. Default: 800 (with --quick: 200)."""

    jobs: int = 1
    """Number of methods at a time, each in a process of its own; they share the threads. Default: 1."""

    def job(self) -> PropertiesJob:
        check_range(self, jobs=(1, MOST_JOBS))
        self.check_seeds()
        trains = ("data", "column", "quick", "length", "steps", "seeds", "seed")
        for field in fields(self):
            if self.results is not None and field.name in trains and getattr(self, field.name) != default(field):
                raise InputError(field.name, "only without `results`, whose models are already trained")

        names = None if self.positions is None else listed("positions", self.positions)

        from ...lab.encoders import BASELINE
        from ...positions import position_names
        from .run import PropertiesJob

        if names is not None and BASELINE in names:
            raise InputError("positions", f"{BASELINE!r} has no properties; it is what the others are compared with")
        if self.results is not None:
            return PropertiesJob(positions=names, jobs=self.jobs, comparison=self.results)
        usual = QUICK_STEPS if self.quick else DEFAULT_STEPS
        comparison = Compare(
            positions=",".join(dict.fromkeys([BASELINE, *(names or position_names(for_text=True))])),
            data=self.data,
            column=self.column,
            out=self.out / "comparison",
            length=Compare.length if self.length is None else self.length,
            steps=usual if self.steps is None else self.steps,
            # Six properties need no search for the best learning rate.
            rate_factors="1",
            seeds=self.seeds,
            seed=self.seed,
            device="cpu",
            jobs=self.jobs,
        ).job()
        return PropertiesJob(positions=names, jobs=self.jobs, comparison=comparison)
