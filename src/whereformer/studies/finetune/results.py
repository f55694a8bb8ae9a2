"""The contents of a fine-tuning's ``results.json``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...data.glue import RowFacts
from ...errors import InputError
from ...lab.json_files import check_heads, check_that
from ...lab.store import Results
from ...lab.training.results import LossPoint
from .settings import TuningSettings
from .variants import OWN, Variant


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(TuningSettings):
    """The settings that all runs in a folder share.

    Args:
        weights: the fingerprint of the pretrained weights.
        device: the kind of device, such as "cpu".
        tokenizer: the fingerprint of the tokenizer's vocabulary.
    """

    weights: str
    device: str
    tokenizer: str


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
class FinetuneResults(Results):
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

    def run(self, task: str, variant: Variant, seed: int) -> TunedModel | None:
        """Return the finished run of a task, variant and seed, or None."""
        return self.runs.get(task, {}).get(variant.name, {}).get(seed)

    def with_run(
        self, task: str, variant: Variant, seed: int, run: TunedModel, curves: list[list[list[float]]] | None
    ) -> FinetuneResults:
        """Return these results with a finished run added. Its curves replace those of the method's previous run."""
        by_variant = self.runs.get(task, {})
        runs = {**self.runs, task: {**by_variant, variant.name: {**by_variant.get(variant.name, {}), seed: run}}}
        if curves is None:
            return replace(self, runs=runs)
        kept = {**self.curves.get(task, {}), variant.position or OWN: KeptCurves(variant.name, seed, curves)}
        return replace(self, runs=runs, curves={**self.curves, task: kept})


def earlier_results(out: Path, settings: FinetuneSettings, tasks: dict[str, TaskFacts]) -> FinetuneResults | None:
    """Return the results that an earlier run left in a folder, or None.

    Raises:
        InputError: if the folder holds results for other settings, or for other rows or classes of a task, or its
            ``results.json`` is something else.
    """
    found = FinetuneResults.earlier(out, settings=settings)
    if found is None:
        return None
    for name, new in tasks.items():
        old = found.tasks.get(name, new)
        if old.fingerprint != new.fingerprint:
            raise InputError("out", f"{out} holds results for other rows of {name}; choose another folder")
        for fact in ("classes", "metrics"):
            before, now = getattr(old, fact), getattr(new, fact)
            if before != now:
                raise InputError(
                    "out", f"{out} holds results for {name} with {fact} {before}, not {now}; choose another folder"
                )
    return found
