"""Run fine-tuning: one pretrained model with several position methods and seeds on each task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from ...data.fingerprint import fingerprint
from ...data.rows import RowCache
from ...lab import ranks
from ...lab.jobs import threads
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.shown import Plan
from ...lab.store import complete, missing
from ...lab.training.trainer import quiet_transformers, slow_dtype
from .prepare import Checked, Encoded, prepare
from .report import plan
from .results import FinetuneResults, Shown, Tuned
from .settings import DataSettings, FinetuneSettings, TuningSettings
from .train import finetune_one
from .variants import BASELINE, Setting, Variant, distinct

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Key = tuple[str, str, int]
"""A task, a variant and a seed."""


@dataclass(frozen=True)
class FinetuneJob:
    """Everything that fine-tuning needs.

    Args:
        model: a folder or an id on the Hub.
        tokenizer: the model's tokenizer.
        data: the tasks to fine-tune on.
        settings: the position methods, each with its variants.
        seeds: seeds of the head, the new kernels, the order of rows and dropout.
        tuning: how to train.
        device: where to train.
        cache: the folder for tokenized rows; by default ``cache`` in the run's folder.
        jobs: the number of runs at a time.
        threads: threads on the CPU; by default torch's.
    """

    model: str
    tokenizer: PreTrainedTokenizerBase
    data: DataSettings
    settings: list[Setting]
    seeds: list[int]
    tuning: TuningSettings
    device: torch.device
    cache: Path | None = None
    jobs: int = 1
    threads: int | None = None

    @property
    def variants(self) -> dict[str, Variant]:
        """Every different model, by name."""
        return {variant.name: variant for variant in distinct(self.settings)}

    def steps(self, encoded: Encoded) -> int:
        """Return the number of training steps of a run."""
        return max(1, round(self.tuning.epochs * math.ceil(len(encoded.train) / self.tuning.batch_size)))

    def run(self, folder: Path, progress: Progress) -> FinetuneResults:
        """Fine-tune every model on every task with every seed. Every variant runs with one seed before the next.

        Raises:
            InputError: if something does not fit, the folder holds other results, or a loss stops being a number.
        """
        with threads(self.threads):
            checked, results = self._checked(folder, None, progress)
            progress.line(plan(self, checked))
            if note := slow_dtype(self.tuning.dtype, self.device):
                progress.line(note)
            keys = missing(
                results,
                [(task, name, seed) for task in checked.tasks for seed in self.seeds for name in self.variants],
                progress,
            )
            progress.start(sum(self.steps(checked.tasks[task]) for task, _, _ in keys))
            work = partial(self._tune, checked.tasks, folder)
            return complete(results, folder, keys, work, progress, self.jobs, done=_told)

    def plan(self, folder: Path, progress: Progress) -> Plan:
        """Return what :meth:`run` would do; see there for errors."""
        with threads(self.threads), TemporaryDirectory() as scratch:
            checked, _ = self._checked(folder, Path(scratch), progress)
            note = slow_dtype(self.tuning.dtype, self.device)
            return Plan(plan(self, checked), () if note is None else (note,))

    def _checked(self, folder: Path, scratch: Path | None, progress: Progress) -> tuple[Checked, FinetuneResults]:
        progress.begin("reading rows and models")
        checked = prepare(self, RowCache(self.cache or folder / "cache", scratch, progress))
        return checked, ranks.from_main(lambda: self._earlier(checked, folder))

    def _earlier(self, checked: Checked, folder: Path) -> FinetuneResults:
        """Return the results before any missing run: those of earlier runs, updated for this job."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        settings = FinetuneSettings(
            **asdict(self.tuning),
            weights=checked.weights,
            device=self.device.type,
            tokenizer=fingerprint(f"{token} {number}" for token, number in vocabulary),
        )
        tasks = {name: task.facts() for name, task in checked.tasks.items()}
        earlier = FinetuneResults.earlier_of(folder, settings, tasks)
        variants = [variant for setting in self.settings for variant in setting.variants]
        baseline = {0 for variant in variants if variant.label == BASELINE}
        origin = provenance(self.device)
        libraries = {name: version(name) for name in ("tokenizers", "scikit-learn", "scipy")}
        return FinetuneResults(
            settings=settings,
            tasks=tasks if earlier is None else {**earlier.tasks, **tasks},
            runs={} if earlier is None else earlier.runs,
            curves={} if earlier is None else earlier.curves,
            model=self.model,
            parameters=checked.parameters if earlier is None else {**earlier.parameters, **checked.parameters},
            shown=Shown(
                positions=[setting.position for setting in self.settings],
                kernels=sorted(baseline | {variant.kernels for variant in variants if variant.kernels}),
                seeds=self.seeds,
            ),
            **{**origin, "versions": {**origin["versions"], **libraries}},
        )

    def _tune(self, tasks: dict[str, Encoded], folder: Path, key: Key, progress: Progress) -> Tuned:
        task, name, seed = key
        progress.begin(f"{task}, {name}" + (f", seed {seed}" if len(self.seeds) > 1 else ""))
        with quiet_transformers():
            return finetune_one(self, tasks[task], self.variants[name], seed, folder, progress)


def _told(key: Sequence[object], run: Tuned) -> str:
    task, name, seed = key
    scores = ", ".join(
        f"{judged} {metric} {100 * value:.1f}".strip()
        for judged, by_metric in run.model.scores.items()
        for metric, value in by_metric.items()
    )
    return f"{task}, {name}, seed {seed}: {scores}; {run.model.seconds:.0f} s"
