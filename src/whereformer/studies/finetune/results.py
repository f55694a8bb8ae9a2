"""The contents of a fine-tuning's ``results.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...data.glue import RowFacts
from ...errors import InputError
from ...lab.json_files import check_heads, check_that
from ...lab.store import RunResults
from ...lab.training.results import LossPoint
from .settings import FinetuneSettings
from .variants import method_of

if TYPE_CHECKING:
    from ...lab.sheet import Sheet


@dataclass(frozen=True)
class TaskFacts(RowFacts):
    """Facts about a task and its rows.

    Args:
        judged: the splits that judge it, by the names that tables use.
        metrics: names of its metrics.
        classes: names of its classes; None for a regression task.
        tokens_of_a_row: the "median" and the "most".
        cut_rows: number of rows that were truncated.
    """

    judged: list[str]
    metrics: list[str]
    classes: list[str] | None
    tokens_of_a_row: dict[str, int]
    cut_rows: int


@dataclass(frozen=True)
class TunedModel:
    """One run: a model fine-tuned on a task with a seed.

    Args:
        scores: the scores by split and metric, at most 1.
        seconds, cpu_seconds: training time.
        train_loss: the training loss at some of the steps.
    """

    scores: dict[str, dict[str, float]]
    seconds: float
    cpu_seconds: float
    train_loss: list[LossPoint]


@dataclass(frozen=True)
class KeptCurves:
    """What the heads of a run add to scores, [layer][head][offset]."""

    variant: str
    seed: int
    heads: list[list[list[float]]]


@dataclass(frozen=True)
class Tuned:
    """A finished run: what is kept of every run, and what is kept of a method's last one, if it has curves."""

    model: TunedModel
    curves: KeptCurves | None


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
    """The results of fine-tuning, finished or so far.

    Args:
        settings: the settings that all runs share.
        tasks: facts about each task, by name.
        runs: the finished runs, by task, variant and seed.
        curves: the curves of the last run of each task and position method.
        model: a folder or an id on the Hub.
        parameters: the parameter counts of each variant.
        shown: what the tables show.
    """

    FORMAT = "finetune 1"
    KEYS = 3

    settings: FinetuneSettings
    tasks: dict[str, TaskFacts]
    runs: dict[str, dict[str, dict[int, TunedModel]]]
    curves: dict[str, dict[str, KeptCurves]]
    model: str
    parameters: dict[str, ParameterCounts]
    shown: Shown

    def check(self) -> None:
        for task, facts in self.tasks.items():
            check_that(bool(facts.judged and facts.metrics), f"tasks.{task}", "splits and metrics")
            check_that(set(facts.subsets) <= facts.rows.keys(), f"tasks.{task}.subsets", "splits with rows")
        for task, variants in self.runs.items():
            check_that(task in self.tasks, f"runs.{task}", "a task of the file")
            facts = self.tasks[task]
            for variant, seeds in variants.items():
                check_that(bool(seeds), f"runs.{task}.{variant}", "a run for a seed")
                for seed, run in seeds.items():
                    scored = all(set(facts.metrics) <= run.scores.get(split, {}).keys() for split in facts.judged)
                    check_that(scored, f"runs.{task}.{variant}.{seed}", "each metric of each split")
        for task, kept in self.curves.items():
            for name, curves in kept.items():
                check_heads(f"curves.{task}.{name}", curves.heads)
        check_that(bool(self.shown.positions and self.shown.seeds), "shown", "positions and seeds")

    def with_run(self, key: tuple[Any, ...], run: Tuned) -> Self:
        """Return these results with a finished run added. Its curves replace those of the method's previous run."""
        results = super().with_run(key, run.model)
        if run.curves is None:
            return results
        task, variant, _ = key
        kept = {**self.curves.get(task, {}), method_of(variant): run.curves}
        return replace(results, curves={**self.curves, task: kept})

    @classmethod
    def earlier_of(cls, folder: Path, settings: FinetuneSettings, tasks: Mapping[str, TaskFacts]) -> Self | None:
        """Return the results that an earlier run left in a folder, or None.

        Raises:
            InputError: if the folder holds results for other settings, or for other rows or classes of a task, or its
                ``results.json`` is something else.
        """
        results = cls.earlier(folder, settings=settings)
        if results is None:
            return None
        for name, new in tasks.items():
            old = results.tasks.get(name, new)
            if old.fingerprint != new.fingerprint:
                raise InputError("out", f"{folder} holds results for other rows of {name}; choose another folder")
            for fact in ("classes", "metrics"):
                before, now = getattr(old, fact), getattr(new, fact)
                if before != now:
                    raise InputError(
                        "out",
                        f"{folder} holds results for {name} with {fact} {before}, not {now}; choose another folder",
                    )
        return results

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
