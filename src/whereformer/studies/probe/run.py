"""Run probes: train a small encoder for every task, method and seed, and judge it at three lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.store import FILE, complete, missing
from .results import Failed, ProbeResults, Run
from .settings import ProbeSettings
from .train import LENGTH_FACTORS, Judged, check_positions, check_tasks, train_and_judge

Key = tuple[str, str, int]
"""A task, a method and a seed."""


@dataclass(frozen=True)
class ProbeJob:
    """Everything that probes need; :meth:`of` checks it.

    Args:
        settings: the settings that all runs share.
        tasks, positions: the tasks and the methods.
        seeds: each method is trained once on each task with each seed.
        device: where to train.
        jobs: the number of runs at a time.
    """

    settings: ProbeSettings
    tasks: Sequence[str]
    positions: Sequence[str]
    seeds: Sequence[int]
    device: torch.device
    jobs: int = 1

    @classmethod
    def of(
        cls,
        settings: ProbeSettings,
        tasks: Sequence[str],
        positions: Sequence[str],
        seeds: Sequence[int],
        device: torch.device,
        jobs: int = 1,
    ) -> ProbeJob:
        """Check tasks and methods.

        Raises:
            InputError: if a task or a method is unknown or does not fit these settings.
        """
        tasks, positions = check_tasks(tasks, settings), check_positions(positions, settings)
        return cls(settings, tasks, positions, seeds, device, jobs)

    def run(self, folder: Path, progress: Progress) -> ProbeResults:
        """Train and judge every method on every task with every seed.

        Raises:
            InputError: if the folder holds results for other settings.
        """
        lengths = [factor * self.settings.length for factor in LENGTH_FACTORS]
        earlier = ProbeResults.earlier(folder, settings=self.settings)
        guesses = {task: {length: Judged.of(task, length).guess for length in lengths} for task in self.tasks}
        results = ProbeResults(
            settings=self.settings,
            runs={} if earlier is None else earlier.runs,
            guesses={**({} if earlier is None else earlier.guesses), **guesses},
            **provenance(self.device),
        )
        keys = missing(
            results,
            [(task, name, seed) for seed in self.seeds for task in self.tasks for name in self.positions],
            progress,
        )
        progress.start(len(keys) * self.settings.steps)
        results = complete(results, folder, keys, self._train, progress, self.jobs, done=_done)
        # Several processes finish in any order.
        results = results.ordered(self.tasks, self.positions)
        results.write(folder / FILE)
        return results

    def _train(self, key: Key, progress: Progress) -> Run | Failed:
        task, name, seed = key
        progress.begin(f"{task}, {name}" + (f", seed {seed}" if len(self.seeds) > 1 else ""))
        return train_and_judge(
            task, name, seed, self.settings, self.device, lambda loss: progress.step(1, f"loss {loss:.2f}")
        )


def _done(key: Key, run: Run | Failed) -> str | None:
    task, name, seed = key
    return f"{task}, {name}, seed {seed}: failed, {run.failed}; the others go on" if isinstance(run, Failed) else None
