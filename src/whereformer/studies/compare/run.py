"""Run a comparison: train the same small encoder with each position method, score it, and measure speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...data.corpus import Text
from ...data.masks import IGNORED
from ...lab.encoders import BASELINE
from ...lab.fit import DivergedError
from ...lab.jobs import spread
from ...lab.plugins import load_plugin, sources_of
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.store import FILE, missing, refuse_other_settings
from .budget import duration, plan, shared_seconds
from .models import model_folder, model_problem
from .prepare import Material, prepare
from .results import Budget, CompareResults, Run, Score, Trial
from .search import best_rate, rates, search_rate, short_steps
from .settings import CompareSettings
from .speed import ROUNDS, measure_speed
from .train import judging_steps, train_and_judge


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """Everything that a comparison needs, already checked: its options, and:

    Args:
        settings: the settings that all runs share, without the text's.
        text: the text, which has not been read.
        free_seeds: whether ``minutes`` also decides the number of seeds.
    """

    settings: CompareSettings
    positions: Sequence[str]
    seeds: Sequence[int]
    device: torch.device
    text: Text
    jobs: int = 1
    minutes: float | None = None
    free_seeds: bool = False
    plugin: Path | None = None

    def run(self, folder: Path, progress: Progress) -> CompareResults:
        """Find each method's learning rate, train and judge it with every seed, then measure speed.

        ``results.json`` is written at the start and after every search and run. Those that it already holds are not
        repeated, if their models are as they were saved. A method whose loss is not finite is left out, with the reason
        in ``failed``, and the others go on.

        Raises:
            InputError: if the folder holds results for other settings, or the minutes are too few.
        """
        job, budget = self, None
        if self.minutes is not None:
            budget = self._budget(self.minutes, folder, progress)
            progress.line(f"{self.minutes:g} minutes: {budget.steps:,} steps for each method, seeds: {budget.seeds}")
            seeds = range(self.seeds[0], self.seeds[0] + budget.seeds)
            job = replace(self, settings=replace(self.settings, steps=budget.steps), seeds=seeds)
        progress.begin("reading the text and training a tokenizer")
        material = prepare(job, folder, progress)
        text = material.facts
        progress.line(
            f"{text.training_tokens:,} training and {text.held_out_tokens:,} held-out tokens from {text.source}; "
            f"guessing by frequency: loss {text.unigram_entropy:.2f}"
        )
        return _Comparison(job, material, folder, progress, budget).run()

    def _budget(self, minutes: float, folder: Path, progress: Progress) -> Budget:
        """Return the budget that the folder's results began with, or a new one, by the speed of a few steps."""
        seeds = None if self.free_seeds else len(self.seeds)
        if (earlier := CompareResults.earlier(folder)) is not None:
            kept = earlier.budget
            refuse_other_settings(folder, {"minutes": kept and kept.minutes}, {"minutes": minutes})
            assert kept is not None  # as there are minutes
            return kept if seeds is None else replace(kept, seeds=seeds)
        progress.begin("measuring the speed of each method")
        step = shared_seconds(self.settings, self.positions, self.device, self.jobs)
        return plan(minutes, step, self.settings, seeds)


class _Comparison:
    """A comparison at work: its results grow, and are written whenever they do."""

    def __init__(
        self, job: CompareJob, material: Material, folder: Path, progress: Progress, budget: Budget | None
    ) -> None:
        self.job, self.material, self.folder, self.progress = job, material, folder, progress
        self.settings = material.settings
        self.steps_per_run = self.settings.steps + judging_steps(material)
        found = CompareResults.earlier(folder, settings=self.settings) or CompareResults(
            settings=self.settings, runs={}, text=material.facts, predicted_tokens=0
        )
        sources = sources_of(job.positions)
        changed = [name for name in job.positions if found.sources.get(name, sources.get(name)) != sources.get(name)]
        if changed:
            progress.line(f"training {', '.join(changed)} again: the plugin has changed")
        self.results = replace(
            found.without(changed),
            text=material.facts,
            predicted_tokens=int((material.held_out.labels != IGNORED).sum()),
            budget=budget or found.budget,
            failed={},
            characters=material.characters,
            plugin=None if job.plugin is None else str(job.plugin),
            sources={**found.sources, **sources},
        )
        self.missing = missing(
            self._with_models(), [(name, seed) for seed in job.seeds for name in job.positions], progress
        )

    def run(self) -> CompareResults:
        """Do all that is missing."""
        job, progress, names = self.job, self.progress, list(dict.fromkeys(name for name, _ in self.missing))
        self._keep(**(provenance(job.device) if names else {}))
        tried = len(self.settings.rate_factors)
        searched = [name for name in names if name not in self.results.trials] if tried > 1 else []
        timed = self.results.speed.keys() >= set(job.positions)
        rounds = 0 if timed else ROUNDS + len({BASELINE, *job.positions})
        steps = len(self.missing) * self.steps_per_run + len(searched) * tried * short_steps(self.settings)
        if names and job.minutes is None:
            step = shared_seconds(self.settings, names, job.device, job.jobs, timed=1)
            runs = f"{len(self.missing)} run" + ("s" if len(self.missing) > 1 else "")
            progress.line(f"about {duration(step * steps / len(names))} for {runs}")
        progress.start(steps + rounds * len(job.positions))
        self._search(searched)
        for seed in job.seeds:
            self._train_all(seed)
        if not timed:
            progress.begin("speed and memory")
            measured = measure_speed(self.material, job.positions, lambda: progress.step(len(job.positions)))
            self._keep(speed={**self.results.speed, **measured})
        # Several processes finish in any order.
        self.results = self.results.ordered(job.positions)
        self._keep()
        return self.results

    def _keep(self, **changes: Any) -> None:
        self.results = replace(self.results, **changes)
        self.results.write(self.folder / FILE)

    def _with_models(self) -> CompareResults:
        """Return the results without runs whose model is gone or changed."""
        runs = {name: dict(by_seed) for name, by_seed in self.results.runs.items()}
        for (name, seed), _ in self.results.each():
            wanted = name in self.job.positions and seed in self.job.seeds
            if wanted and (problem := model_problem(self.folder, self.settings, name, seed)) is not None:
                place = model_folder(self.folder, name, seed)
                self.progress.line(f"training {name} with seed {seed} again: {place}: {problem}")
                del runs[name][seed]
        return replace(self.results, runs=runs)

    def _search(self, names: Sequence[str]) -> None:
        """Try the learning rates with each of these methods."""
        work = partial(_try_rates, self.material, self.job.seeds[0], self.job.plugin)
        for name, trials in spread(work, names, self.job.jobs, self.progress):
            self._keep(trials={**self.results.trials, name: trials})
            self.progress.line(f"{name}, losses of short trainings by learning rate: {', '.join(map(str, trials))}")

    def _train_all(self, seed: int) -> None:
        """Train and judge every method that lacks a run with a seed."""
        tasks, tried = [], rates(self.settings)
        for number, (name, own) in enumerate(self.missing, 1):
            if own != seed or name in self.results.failed:
                continue
            trials = self.results.trials.get(name, [])
            rate = tried[0] if len(tried) == 1 else best_rate(trials, self.settings.learning_rate)
            if rate is None:
                at = ", ".join(f"{each:g}" for each in tried)
                reason = f"the loss of {name!r} is not finite (NaN or inf) at any of {at}; try {min(tried) / 4:g}"
                self._keep(failed={**self.results.failed, name: reason})
            else:
                tasks.append((name, seed, rate, f"{name} ({number}/{len(self.missing)})"))
        train = partial(_train, self.material, self.folder, self.job.plugin)
        for (name, *_), run in spread(train, tasks, self.job.jobs, self.progress):
            if isinstance(run, str):
                self._keep(failed={**self.results.failed, name: run})
            else:
                self._keep(runs=self.results.with_run((name, seed), run).runs)
            about = run if isinstance(run, str) else about_run(run, self.settings.length)
            self.progress.line(f"{name}, seed {seed}: {about}")


def about_run(run: Run, length: int) -> str:
    """Return what came out of a run."""
    score = run.scores[length]
    assert isinstance(score, Score)  # a method that can't read the training length fails in training
    return f"held-out loss {score.loss:.3f}, accuracy of tokens {score.accuracy:.1%}, {run.seconds:.0f} s"


def _try_rates(material: Material, seed: int, plugin: Path | None, name: str, progress: Progress) -> list[Trial]:
    load_plugin(plugin)
    progress.begin(f"{name} (learning rate)")
    return search_rate(material, name, seed, lambda loss: progress.step(1, f"loss {loss:.2f}"))


def _train(
    material: Material, folder: Path, plugin: Path | None, task: tuple[str, int, float, str], progress: Progress
) -> Run | str:
    """Train and judge a method with a seed, or return why its loss is not finite. The task also has its label."""
    load_plugin(plugin)
    name, seed, rate, label = task
    progress.begin(label)
    try:
        return train_and_judge(material, name, seed, rate, folder, progress)
    except DivergedError as error:
        return error.reason
