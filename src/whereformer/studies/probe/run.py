"""Run probes: train a small encoder for every task, method and seed, and judge it at three lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ...lab.jobs import spread
from ...lab.progress import Progress
from ...lab.provenance import provenance
from .results import Failed, ProbeResults, ProbeSettings, Run, Runs, earlier_results
from .settings import Sizes
from .train import LENGTH_FACTORS, Judged, check_positions, check_tasks, train_and_judge

DEFAULT_POSITIONS = ("none", "learned", "rope", "alibi", "t5", "shaw", "tisa")
QUICK_POSITIONS = ("none", "learned", "rope", "tisa")
DEFAULT_STEPS = 500
QUICK_STEPS = 100


@dataclass(frozen=True)
class ProbeJob:
    """Everything that probes need; :meth:`of` checks it.

    Args:
        settings: the settings that all runs share.
        tasks, positions: the tasks and the methods.
        seeds: each method is trained once on each task with each seed.
        device: where to train.
    """

    settings: ProbeSettings
    tasks: Sequence[str]
    positions: Sequence[str]
    seeds: Sequence[int]
    device: torch.device

    @classmethod
    def of(
        cls, sizes: Sizes, tasks: Sequence[str], positions: Sequence[str], seeds: Sequence[int], device: torch.device
    ) -> ProbeJob:
        """Check tasks and methods.

        Raises:
            InputError: if a task or a method is unknown or does not fit these sizes.
        """
        settings = ProbeSettings(**asdict(sizes), device=device.type)
        return cls(settings, check_tasks(tasks, sizes), check_positions(positions, sizes), seeds, device)


def probe(job: ProbeJob, out: Path, progress: Progress, jobs: int = 1) -> ProbeResults:
    """Train and judge every method on every task with every seed, ``jobs`` at a time.

    ``out/results.json`` is written after every run. Runs that it already holds are not repeated.

    Raises:
        InputError: if ``out`` holds results for other settings.
    """
    path, lengths = out / "results.json", [factor * job.settings.length for factor in LENGTH_FACTORS]
    earlier = earlier_results(out, job.settings)
    guesses = {task: {length: Judged.of(task, length).guess for length in lengths} for task in job.tasks}
    results = ProbeResults(
        settings=job.settings,
        runs={} if earlier is None else earlier.runs,
        guesses={**({} if earlier is None else earlier.guesses), **guesses},
        **provenance(job.device),
    )
    every = [(task, name, seed) for seed in job.seeds for task in job.tasks for name in job.positions]
    missing = [each for each in every if results.run(*each) is None]
    progress.start(len(missing) * job.settings.steps)
    if len(missing) < len(every):
        progress.line(f"{len(every) - len(missing)} of {len(every)} runs are already done; continuing with the others")
    for (task, name, seed), run in spread(partial(_train, job), missing, jobs, progress):
        results = results.with_run(task, name, seed, run)
        results.save(path)
        if isinstance(run, Failed):
            progress.line(f"{task}, {name}, seed {seed}: failed, {run.failed}; the others go on")
    results = replace(results, runs=_ordered(results, job))
    results.save(path)
    return results


def _ordered(results: ProbeResults, job: ProbeJob) -> Runs:
    """Return the runs with the job's tasks and methods first, since several processes finish in any order."""
    return {
        task: {
            name: results.runs[task][name]
            for name in (*job.positions, *results.runs[task])
            if name in results.runs[task]
        }
        for task in dict.fromkeys((*job.tasks, *results.runs))
    }


def _train(job: ProbeJob, which: tuple[str, str, int], progress: Progress) -> Run | Failed:
    """Train and judge a task, a method and a seed."""
    task, name, seed = which
    progress.begin(f"{task}, {name}" + (f", seed {seed}" if len(job.seeds) > 1 else ""))
    return train_and_judge(
        task, name, seed, job.settings, job.device, lambda loss: progress.step(1, f"loss {loss:.2f}")
    )
