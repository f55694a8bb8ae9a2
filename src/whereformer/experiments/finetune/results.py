"""What ``results.json`` of a fine-tuning holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...data.glue import RowFacts
from ...errors import InputError
from ...runs.results import Results, refuse_other_settings
from ...training.results import LossPoint
from .settings import TuningSettings
from .variants import OWN, Variant


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(TuningSettings):
    """All that the runs of one folder have in common.

    Args:
        weights: the fingerprint of the pretrained weights.
        device: the kind of device.
        tokenizer: the fingerprint of its vocabulary.
    """

    weights: str
    device: str
    tokenizer: str


@dataclass(frozen=True)
class TaskFacts(RowFacts):
    """What is known about a task.

    Args:
        judged: what a table calls the splits that it is judged by.
        metrics: by which.
        classes: their names; None where a number is predicted.
        tokens_of_a_row: "median" and "most".
        cut_rows: how many lost their end.
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
        scores: by split and metric, at most 1.
        seconds, cpu_seconds: of training.
        train_loss: at some steps.
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
    """Parameters of a model: in all, of position, and those of position that the checkpoint does not have."""

    all: int
    position: int
    fresh: int


@dataclass(frozen=True)
class Shown:
    """What tables are made of: the runs that were asked for last."""

    positions: list[str]
    kernels: list[int]
    seeds: list[int]


@dataclass(frozen=True)
class FinetuneResults(Results):
    """A fine-tuning as far as it has come.

    Args:
        settings: what its runs have in common.
        tasks: by name.
        runs: by task, variant and seed.
        curves: of the last run of each task and position method.
        model: a folder or an id on the Hub.
        parameters: of each variant.
        shown: what its tables are made of.
    """

    FORMAT = "finetune 1"

    settings: FinetuneSettings
    tasks: dict[str, TaskFacts]
    runs: dict[str, dict[str, dict[int, TunedModel]]]
    curves: dict[str, dict[str, KeptCurves]]
    model: str
    parameters: dict[str, ParameterCounts]
    shown: Shown

    def run(self, task: str, variant: Variant, seed: int) -> TunedModel | None:
        """The finished run, if there is one."""
        return self.runs.get(task, {}).get(variant.name, {}).get(seed)

    def with_run(
        self, task: str, variant: Variant, seed: int, run: TunedModel, curves: list[list[list[float]]] | None
    ) -> FinetuneResults:
        """These results and a finished run; its curves take the place of those of the last run with its method."""
        by_variant = self.runs.get(task, {})
        runs = {**self.runs, task: {**by_variant, variant.name: {**by_variant.get(variant.name, {}), seed: run}}}
        if curves is None:
            return replace(self, runs=runs)
        kept = {**self.curves.get(task, {}), variant.position or OWN: KeptCurves(variant.name, seed, curves)}
        return replace(self, runs=runs, curves={**self.curves, task: kept})


def earlier_results(out: Path, settings: FinetuneSettings, tasks: dict[str, TaskFacts]) -> FinetuneResults | None:
    """What an earlier run left in a folder.

    Raises:
        InputError: if the folder holds results of other settings, of other rows or classes of a task, or something
            else.
    """
    found = FinetuneResults.load_if_there(out / "results.json")
    if found is None:
        return None
    refuse_other_settings(out, asdict(found.settings), asdict(settings))
    for name, new in tasks.items():
        old = found.tasks.get(name, new)
        if old.fingerprint != new.fingerprint:
            raise InputError("out", f"{out} holds results of other rows of {name}; choose another folder")
        for fact in ("classes", "metrics"):
            before, now = getattr(old, fact), getattr(new, fact)
            if before != now:
                raise InputError(
                    "out", f"{out} holds results of {name} with {fact} {before}, not {now}; choose another folder"
                )
    return found
