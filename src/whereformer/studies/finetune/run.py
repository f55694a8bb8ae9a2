"""Run fine-tuning: one pretrained model with several position methods and seeds on each task."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from ...data.fingerprint import fingerprint
from ...lab import ranks
from ...lab.jobs import spread
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.training.trainer import quiet_transformers
from .prepare import Checked, Encoded, FinetuneJob
from .results import FinetuneResults, FinetuneSettings, Shown, TunedModel, earlier_results
from .train import finetune_one
from .variants import BASELINE, Variant


def begin(job: FinetuneJob, checked: Checked, out: Path) -> FinetuneResults:
    """Return the results before any missing run: those of earlier runs in ``out``, updated for this job.

    Raises:
        InputError: if ``out`` holds results for other settings or for other rows or classes of a task, or its
            ``results.json`` is something else.
    """
    vocabulary = sorted(job.tokenizer.get_vocab().items())
    settings = FinetuneSettings(
        **asdict(job.tuning),
        weights=checked.weights,
        device=job.device.type,
        tokenizer=fingerprint(f"{token} {number}" for token, number in vocabulary),
    )
    tasks = {task.data.task.name: task.facts() for task in checked.tasks}
    earlier = earlier_results(out, settings, tasks)
    variants = [variant for setting in job.settings for variant in setting.variants]
    baseline = {0 for variant in variants if variant.label == BASELINE}
    origin = provenance(job.device)
    libraries = {name: version(name) for name in ("tokenizers", "scikit-learn", "scipy")}
    return FinetuneResults(
        settings=settings,
        tasks=tasks if earlier is None else {**earlier.tasks, **tasks},
        runs={} if earlier is None else earlier.runs,
        curves={} if earlier is None else earlier.curves,
        model=job.model,
        parameters=checked.parameters if earlier is None else {**earlier.parameters, **checked.parameters},
        shown=Shown(
            positions=[setting.position for setting in job.settings],
            kernels=sorted(baseline | {variant.kernels for variant in variants if variant.kernels}),
            seeds=job.seeds,
        ),
        **{**origin, "versions": {**origin["versions"], **libraries}},
    )


def finetune(
    job: FinetuneJob, checked: Checked, results: FinetuneResults, out: Path, progress: Progress, jobs: int = 1
) -> FinetuneResults:
    """Do every run that ``results`` lacks, ``jobs`` at a time, and write ``out/results.json`` after each.

    Raises:
        InputError: if a loss stops being a number.
    """
    path = out / "results.json"
    by_name = {encoded.data.task.name: encoded for encoded in checked.tasks}
    every = [(by_name[data.task.name], seed, variant) for data, seed, variant in job.runs()]
    missing = [
        (encoded, seed, variant)
        for encoded, seed, variant in every
        if results.run(encoded.data.task.name, variant, seed) is None
    ]
    progress.start(sum(job.steps(encoded) for encoded, _, _ in missing))
    if len(missing) < len(every):
        progress.line(f"{len(every) - len(missing)} of {len(every)} runs are already done")
    if ranks.is_main():
        results.write(path)
    tasks = [
        (encoded.data.task.name, seed, variant, f"{number}/{len(missing)}")
        for number, (encoded, seed, variant) in enumerate(missing, 1)
    ]
    for (name, seed, variant, _), (found, curves) in spread(partial(_tune, job, by_name, out), tasks, jobs, progress):
        results = results.with_run(name, variant, seed, found, curves)
        if ranks.is_main():
            results.write(path)
        scores = ", ".join(
            f"{judged} {metric} {100 * value:.1f}".strip()
            for judged, by_metric in found.scores.items()
            for metric, value in by_metric.items()
        )
        progress.line(f"{name}, {variant.name}, seed {seed}: {scores}; {found.seconds:.0f} s")
    return results


def _tune(
    job: FinetuneJob,
    tasks: dict[str, Encoded],
    out: Path,
    task: tuple[str, int, Variant, str],
    progress: Progress,
) -> tuple[TunedModel, list[list[list[float]]] | None]:
    """Fine-tune a variant on a task with a seed; the task also has its number."""
    name, seed, variant, number = task
    progress.begin(f"{name}, {variant.name} ({number})")
    with quiet_transformers():
        return finetune_one(job, tasks[name], variant, seed, out, progress)
