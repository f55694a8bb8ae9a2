"""Run fine-tuning: one pretrained model with several position methods and seeds on each task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ...lab import ranks
from ...lab.fingerprint import fingerprint
from ...lab.jobs import threads
from ...lab.loading import quiet_transformers
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.shown import Plan
from ...lab.store import complete, missing
from ...lab.training.trainer import slow_dtype
from .prepare import Checked, Encoded, prepare
from .report import plan
from .results import FinetuneResults, KeptCurves, Shown, TunedModel
from .settings import DataSettings, FinetuneSettings, TuningSettings
from .train import finetune_one
from .variants import BASELINE, Setting, Variant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class FinetuneJob:
    """The options of a fine-tuning, checked and with defaults filled in."""

    model: str
    tokenizer: PreTrainedTokenizerBase
    data: DataSettings
    settings: list[Setting]
    seeds: list[int]
    """Seeds of the head, the new kernels, the order of rows and dropout."""
    tuning: TuningSettings
    device: torch.device
    jobs: int = 1
    threads: int | None = None
    report_to: str = "none"

    @property
    def variants(self) -> dict[str, Variant]:
        """Every different model, by name."""
        return {variant.name: variant for setting in self.settings for variant in setting.variants}

    def steps(self, encoded: Encoded) -> int:
        """Return the number of training steps of a run."""
        return max(1, round(self.tuning.epochs * math.ceil(len(encoded.train) / self.tuning.batch_size)))

    def run(self, folder: Path, progress: Progress) -> FinetuneResults:
        """Fine-tune every model on every task with every seed. Every variant runs with one seed before the next.

        Raises:
            InputError: if something does not fit, the folder holds other results, or a loss is not finite.
        """
        with threads(self.threads):
            checked, results = self._checked(folder, progress)
            progress.line(plan(self, checked))
            for note in slow_dtype(self.tuning.dtype, self.device):
                progress.line(note)
            tasks = checked.tasks
            keys = [(task, name, seed) for task in tasks for seed in self.seeds for name in self.variants]
            keys = missing(results, keys, progress)
            progress.start(sum(self.steps(tasks[task]) for task, _, _ in keys))
            work = partial(self._tune, tasks, folder)
            return complete(results, folder, keys, work, progress, self.jobs, done=_told)

    def plan(self, folder: Path, progress: Progress) -> Plan:
        """Return what :meth:`run` would do; see there for errors."""
        with threads(self.threads):
            checked, _ = self._checked(folder, progress)
            return Plan(plan(self, checked), tuple(slow_dtype(self.tuning.dtype, self.device)))

    def _checked(self, folder: Path, progress: Progress) -> tuple[Checked, FinetuneResults]:
        progress.begin("reading rows and models")
        checked = prepare(self, progress)
        return checked, ranks.from_main(lambda: self._before(checked, folder))

    def _before(self, checked: Checked, folder: Path) -> FinetuneResults:
        """Return the results before any missing run: those of earlier runs, updated for this job."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        settings = FinetuneSettings(
            **asdict(self.tuning),
            weights=checked.weights,
            device=self.device.type,
            tokenizer=fingerprint(f"{token} {number}" for token, number in vocabulary),
        )
        positions = [setting.position for setting in self.settings]
        variants = [variant for setting in self.settings for variant in setting.variants]
        # 0 kernels are the baseline.
        kernels = {variant.kernels or 0 for variant in variants if variant.kernels or variant.label == BASELINE}
        origin = provenance(self.device)
        libraries = {name: version(name) for name in ("tokenizers", "scikit-learn", "scipy")}
        new = FinetuneResults(
            settings=settings,
            tasks={name: task.facts for name, task in checked.tasks.items()},
            runs={},
            curves={},
            model=self.model,
            parameters=checked.parameters,
            shown=Shown(positions, sorted(kernels), self.seeds),
            **{**origin, "versions": {**origin["versions"], **libraries}},
        )
        earlier = FinetuneResults.earlier(folder, settings=settings)
        if earlier is None:
            return new
        for name in new.tasks.keys() & earlier.tasks.keys():
            if earlier.tasks[name].fingerprint != new.tasks[name].fingerprint:
                raise InputError("out", f"{folder} holds results for other rows of {name}; choose another folder")
        return replace(
            new,
            tasks={**earlier.tasks, **new.tasks},
            runs=earlier.runs,
            curves=earlier.curves,
            parameters={**earlier.parameters, **new.parameters},
        )

    def _tune(
        self, tasks: dict[str, Encoded], folder: Path, key: tuple[str, str, int], progress: Progress
    ) -> tuple[TunedModel, KeptCurves | None]:
        task, name, seed = key
        progress.begin(f"{task}, {name}" + (f", seed {seed}" if len(self.seeds) > 1 else ""))
        with quiet_transformers():
            return finetune_one(self, tasks[task], self.variants[name], seed, folder, progress)


def _told(key: Sequence[object], run: Any) -> str:
    (task, name, seed), (model, _) = key, run
    scores = ", ".join(
        f"{judged} {metric} {100 * value:.1f}".strip()
        for judged, by_metric in model.scores.items()
        for metric, value in by_metric.items()
    )
    return f"{task}, {name}, seed {seed}: {scores}; {model.seconds:.0f} s"
