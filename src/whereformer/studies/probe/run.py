"""Run probes: train a small encoder for every task, method and seed, and judge it at three lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.store import FILE, complete, missing
from .results import Failed, ProbeResults, Run
from .settings import ProbeSettings
from .train import LENGTH_FACTORS, HeldOutRows, train_and_judge

Key = tuple[str, str, int]
"""A task, a method and a seed."""


@dataclass(frozen=True)
class ProbeJob:
    """Everything that probes need, already checked.

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
    jobs: int

    def run(self, folder: Path, progress: Progress) -> ProbeResults:
        """Train and judge every method on every task with every seed.

        Raises:
            InputError: if the folder holds results for other settings.
        """
        lengths = [factor * self.settings.length for factor in LENGTH_FACTORS]
        empty = ProbeResults(settings=self.settings, runs={}, guesses={})
        earlier = ProbeResults.earlier(folder, settings=self.settings) or empty
        guesses = {task: {length: HeldOutRows.of(task, length).guess for length in lengths} for task in self.tasks}
        results = replace(earlier, guesses={**earlier.guesses, **guesses}, **provenance(self.device))
        every = [(task, name, seed) for seed in self.seeds for task in self.tasks for name in self.positions]
        keys = missing(results, every, progress)
        progress.start(len(keys) * self.settings.steps)
        results = complete(results, folder, keys, self._train, progress, self.jobs, done=_done)
        # Several processes finish in any order.
        results = results.ordered(self.tasks, self.positions)
        results.write(folder / FILE)
        return results

    def _train(self, key: Key, progress: Progress) -> Run | Failed:
        task, name, seed = key
        progress.begin(f"{task}, {name}, seed {seed}")

        def on_step(loss: float) -> None:
            progress.step(1, f"loss {loss:.2f}")

        return train_and_judge(task, name, seed, self.settings, self.device, on_step)


def _done(key: Key, run: Run | Failed) -> str | None:
    task, name, seed = key
    return f"{task}, {name}, seed {seed}: failed, {run.failed}; the others go on" if isinstance(run, Failed) else None
