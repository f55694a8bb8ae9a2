"""Run a comparison: train the same small encoder with each position method, score it, and measure speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...data.glue import OwnTask
from ...data.masks import IGNORED
from ...lab.encoders import BASELINE
from ...lab.fit import DivergedError
from ...lab.jobs import spread
from ...lab.plugins import load_plugin
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.store import FILE
from .budget import duration, find_budget, shared_seconds
from .halving import survivors
from .models import model_folder, model_problem
from .prepare import Material, prepare
from .ranking import seeds_to_tell
from .results import Budget, CompareResults, CompareTask, Run, Score, Trial
from .search import best_rate, rates, search_rate, short_steps
from .settings import CompareSettings
from .speed import ROUNDS, measure_speed
from .train import steps_of_a_run, train_and_judge

Key = tuple[str, int]
"""A method and a seed."""


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """Everything that a comparison needs, already checked.

    Args:
        settings: the settings that all runs share, without the text's.
        positions: the methods.
        seeds: each method is trained once with each seed.
        device: where to train.
        jobs: the number of runs at a time.
        data, column, characters, table: the text, as :func:`prepare` takes it.
        minutes: wall time of all, which then decides the steps; None if they were given.
        free_seeds: whether the time also decides the number of seeds, and clearly worse methods are left out.
        plugin: a file that registers methods.
        speed: whether to measure speed.
    """

    settings: CompareSettings
    positions: Sequence[str]
    seeds: Sequence[int]
    device: torch.device
    jobs: int = 1
    data: tuple[str, ...] = ()
    column: str | None = None
    characters: int | None = None
    table: OwnTask | None = None
    minutes: float | None = None
    free_seeds: bool = False
    plugin: Path | None = None
    speed: bool = True

    def run(self, folder: Path, progress: Progress) -> CompareResults:
        """Find each method's learning rate, train and judge it with every seed, then measure speed.

        ``results.json`` is written at the start and after every search and run. Those that it already holds are not
        repeated, if their models are as they were saved. A method whose loss is not finite is left out, with the reason
        in ``failed``, and the others go on.

        Raises:
            InputError: if the folder holds results for other settings.
        """
        job, budget = self.planned(folder, progress)
        progress.begin("reading the text and training a tokenizer")
        return job.complete(job.prepare(folder, progress), folder, progress, budget)

    def planned(self, folder: Path, progress: Progress) -> tuple[CompareJob, Budget | None]:
        """Return the job with the steps and seeds that fit into its minutes, and those numbers.

        Raises:
            InputError: if the minutes are too few, or the folder holds results without them.
        """
        if self.minutes is None:
            return self, None
        progress.begin("measuring the speed of each method")
        seeds = None if self.free_seeds else len(self.seeds)
        tuned = self.table is not None
        budget = find_budget(
            folder, self.minutes, self.settings, self.positions, seeds, self.device, tuned=tuned, jobs=self.jobs
        )
        progress.line(f"{self.minutes:g} minutes: {budget.steps:,} steps for each method, seeds: {budget.seeds}")
        first = self.seeds[0]
        chosen = range(first, first + budget.seeds)
        return replace(self, settings=replace(self.settings, steps=budget.steps), seeds=chosen), budget

    def prepare(self, folder: Path, progress: Progress) -> Material:
        """Read and encode the text."""
        return prepare(self.settings, folder, progress, self.data, self.column, self.characters, self.table)

    def complete(
        self, material: Material, folder: Path, progress: Progress, budget: Budget | None = None
    ) -> CompareResults:
        """Do what the folder lacks."""
        text = material.facts
        progress.line(
            f"{text.training_tokens:,} training and {text.held_out_tokens:,} held-out tokens from {text.source}; "
            f"guessing by frequency: loss {text.unigram_entropy:.2f}"
        )
        if material.rows is not None:
            for line in about_table(material.rows.facts, material.settings.length, len(self.positions), self.seeds):
                progress.line(line)
        return _Comparison(self, material, folder, progress, budget).run()


def about_table(task: CompareTask, length: int, methods: int, seeds: Sequence[int]) -> list[str]:
    """Return what is known of a labeled table before training, and a warning if little can come of it."""
    guess = f"; guessing the most frequent class: accuracy {task.guessing:.1%}" if task.classes else ""
    lines = [f"{task.training_rows:,} training and {task.validation_rows:,} validation rows{guess}"]
    if cut := task.about_cut(length):
        lines.append(cut)
    enough = seeds_to_tell(methods)
    if methods > 1 and len(seeds) < enough:
        lines.append(
            f"with {methods} methods and {len(seeds)} seeds, only large differences can be told from chance; "
            f"--seeds {enough} would do"
        )
    return lines


class _Comparison:
    """A comparison at work: its results grow, and are written whenever they do.

    Args:
        job: what to do.
        material: what to train and judge on.
        folder: the run's folder.
        progress: is told what happens.
        budget: what was chosen for a number of minutes.
    """

    def __init__(
        self, job: CompareJob, material: Material, folder: Path, progress: Progress, budget: Budget | None
    ) -> None:
        self.job, self.material, self.folder, self.progress = job, material, folder, progress
        self.settings = material.settings
        self.steps_per_run = steps_of_a_run(material.settings, material.held_out, material.rows)
        earlier = CompareResults.earlier(folder, settings=self.settings)
        found = earlier or CompareResults(
            settings=self.settings, runs={}, text=material.facts, predicted_tokens=0, speed={}
        )
        self.results = replace(
            found,
            text=material.facts,
            predicted_tokens=int((material.held_out.labels != IGNORED).sum()),
            budget=budget or found.budget,
            task=None if material.rows is None else material.rows.facts,
            failed={},
            dropped={},
            characters=material.characters,
            plugin=None if job.plugin is None else str(job.plugin),
        )
        self.missing = self._missing()

    def run(self) -> CompareResults:
        """Do all that is missing."""
        job, progress, missing = self.job, self.progress, self.missing
        self._keep(**(provenance(job.device) if missing else {}))
        searched = [name for name in dict.fromkeys(name for name, _ in missing) if name not in self.results.trials]
        searched = searched if len(self.settings.rate_factors) > 1 else []
        timed = not job.speed or self.results.speed.keys() >= set(job.positions)
        rounds = 0 if timed else ROUNDS + len({BASELINE, *job.positions})
        trials = len(searched) * len(self.settings.rate_factors) * short_steps(self.settings)
        steps = len(missing) * self.steps_per_run + trials
        self._estimate(steps)
        progress.start(steps + rounds * len(job.positions))
        every = len(job.positions) * len(job.seeds)
        if not missing:
            progress.line(f"all {every} runs are already done")
        elif len(missing) < every:
            progress.line(f"{every - len(missing)} of {every} runs are already done; continuing with the others")
        self._search(searched)
        for number, seed in enumerate(job.seeds):
            self._drop(job.seeds[:number])
            self._train_all([key for key in missing if key[1] == seed])
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

    def _missing(self) -> list[Key]:
        """Return the methods and seeds without a run, or without the model of the run."""
        missing = []
        for seed in self.job.seeds:
            for name in self.job.positions:
                if self.results.run(name, seed) is None:
                    missing.append((name, seed))
                elif (problem := model_problem(self.folder, self.settings, name, seed)) is not None:
                    place = model_folder(self.folder, name, seed)
                    self.progress.line(f"training {name} with seed {seed} again: {place}: {problem}")
                    missing.append((name, seed))
        return missing

    def _estimate(self, steps: int) -> None:
        """Tell how long training and judging will take, by the time of one step of each method."""
        if not self.missing or self.job.minutes is not None:
            return
        names = list(dict.fromkeys(name for name, _ in self.missing))
        step = shared_seconds(self.settings, names, self.job.device, self.job.jobs, timed=1)
        runs = f"{len(self.missing)} run" + ("s" if len(self.missing) > 1 else "")
        self.progress.line(f"about {duration(step * steps / len(names))} for {runs}")

    def _search(self, names: Sequence[str]) -> None:
        """Try the learning rates with each of these methods."""
        work = partial(_try_rates, self.material, self.job.seeds[0], self.job.plugin)
        for name, trials in spread(work, names, self.job.jobs, self.progress):
            self._keep(trials={**self.results.trials, name: trials})
            tried = ", ".join(
                f"{each.rate:g}: " + (f"{each.loss:.3f}" if each.loss is not None else "diverged") for each in trials
            )
            self.progress.line(f"{name}, short trainings by learning rate: {tried}")

    def _rate(self, name: str) -> float | None:
        """Return a method's learning rate; None if it diverged with all of them."""
        tried = rates(self.settings)
        if len(tried) == 1:
            return tried[0]
        return best_rate(self.results.trials.get(name, []), self.settings.learning_rate)

    def _drop(self, seeds: Sequence[int]) -> None:
        """Leave out methods after the runs with these seeds, if the job says so."""
        if not (seeds and self.job.minutes is not None and self.job.free_seeds):
            return
        results = self.results
        going_on = {
            name: {seed: run for seed, run in results.runs.get(name, {}).items() if seed in seeds}
            for name in self.job.positions
            if name not in results.dropped and name not in results.failed
        }
        kept = survivors({name: runs for name, runs in going_on.items() if runs})
        lost = [name for name in going_on if name not in kept]
        if lost:
            rest = [key for key in self.missing if key[0] in lost and key[1] > seeds[-1]]
            self.progress.step(len(rest) * self.steps_per_run)
            self.progress.line(f"left out from here on, since clearly worse than the others: {', '.join(lost)}")
        self._keep(dropped={**results.dropped, **dict.fromkeys(lost, len(seeds))})

    def _train_all(self, keys: Sequence[Key]) -> None:
        """Train and judge methods that go on, each with one seed."""
        tasks, failed = [], dict(self.results.failed)
        for name, seed in keys:
            if name in self.results.dropped or name in failed:
                continue
            rate = self._rate(name)
            if rate is None:
                tried = ", ".join(f"{each:g}" for each in rates(self.settings))
                failed[name] = (
                    f"the loss of {name!r} is not finite (NaN or inf) at any of {tried}; "
                    f"try {min(rates(self.settings)) / 4:g}"
                )
                continue
            label = f"{name} ({self.missing.index((name, seed)) + 1}/{len(self.missing)})"
            tasks.append((name, seed, rate, label))
        self.results = replace(self.results, failed=failed)
        train = partial(_train, self.material, self.folder, self.job.plugin)
        for (name, seed, _, _), run in spread(train, tasks, self.job.jobs, self.progress):
            if isinstance(run, str):
                self._keep(failed={**self.results.failed, name: run})
                self.progress.line(f"{name}, seed {seed}: {run}")
            else:
                self.results = self.results.with_run((name, seed), run)
                self._keep()
                self.progress.line(f"{name}, seed {seed}: {about_run(run, self.settings.length, self.results.task)}")
        self._keep()


def about_run(run: Run, length: int, task: CompareTask | None) -> str:
    """Return what came out of a run."""
    score = run.scores[length]
    assert isinstance(score, Score)  # a method that can't read the training length fails in training
    labels = "" if run.task is None or task is None else f"{task.metric} of labels {task.shown(run.task.score)}, "
    return (
        f"{labels}held-out loss {score.loss:.3f}, accuracy of masked tokens {score.accuracy:.1%}, {run.seconds:.0f} s"
    )


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
        return train_and_judge(material, name, seed, rate, model_folder(folder, name, seed), progress)
    except DivergedError as error:
        return error.reason
