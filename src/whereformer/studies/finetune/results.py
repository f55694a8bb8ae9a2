"""The contents of a fine-tuning's ``results.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ...data.glue import RowFacts
from ...lab.store import RunResults
from ...lab.training.results import LossPoint
from .settings import FinetuneSettings
from .variants import method_of

if TYPE_CHECKING:
    from ...lab.sheet import Sheet


@dataclass(frozen=True)
class TaskFacts(RowFacts):
    """Facts about a task and its rows."""

    judged: list[str]
    """The splits that judge it, by the names that tables use."""
    metrics: list[str]
    classes: list[str] | None
    """Names of its classes; None for a regression task."""
    tokens_of_a_row: dict[str, int]
    """The "median" and the "most"."""
    cut_rows: int
    """Number of rows that were truncated."""


@dataclass(frozen=True)
class TunedModel:
    """One run: a model fine-tuned on a task with a seed."""

    scores: dict[str, dict[str, float]]
    """The scores by split and metric, at most 1."""
    seconds: float
    cpu_seconds: float
    train_loss: list[LossPoint]
    """The training loss at some of the steps."""


@dataclass(frozen=True)
class KeptCurves:
    """What the heads of a run add to scores, [layer][head][offset]."""

    variant: str
    seed: int
    heads: list[list[list[float]]]


@dataclass(frozen=True)
class ParameterCounts:
    """A model's number of parameters: all, those of position, and those of position that the checkpoint lacks."""

    all: int
    position: int
    fresh: int


@dataclass(frozen=True)
class Shown:
    """What tables show: the runs that were requested last."""

    positions: list[str]
    kernels: list[int]
    seeds: list[int]


@dataclass(frozen=True)
class FinetuneResults(RunResults):
    """The results of fine-tuning, finished or so far."""

    FORMAT = "finetune 1"
    KEYS = 3

    settings: FinetuneSettings
    tasks: dict[str, TaskFacts]
    runs: dict[str, dict[str, dict[int, TunedModel]]]
    """The finished runs by task, variant and seed."""
    curves: dict[str, dict[str, KeptCurves]]
    """The curves of the last run of each task and position method."""
    model: str
    """A folder or an id on the Hub."""
    parameters: dict[str, ParameterCounts]
    """The parameter counts of each variant."""
    shown: Shown

    def by_seed(self, task: str, variant: str) -> list[TunedModel]:
        """Return the finished runs with the seeds that are shown."""
        runs = self.runs.get(task, {}).get(variant, {})
        return [runs[seed] for seed in self.shown.seeds if seed in runs]

    def with_run(self, key: tuple[Any, ...], run: tuple[TunedModel, KeptCurves | None]) -> Self:
        """Return these results with a finished run added. Its curves replace those of the method's previous run."""
        (task, variant, _), (model, curves) = key, run
        kept = self.curves.get(task, {}) | ({} if curves is None else {method_of(variant): curves})
        return replace(super().with_run(key, model), curves={**self.curves, task: kept} if kept else self.curves)

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
