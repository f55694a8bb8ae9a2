"""Run a comparison: train the same small encoder with each position method, score it, and measure speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...data.masks import HELD_OUT_RATE, IGNORED, HeldOut
from ...errors import InputError
from ...lab.jobs import spread
from ...lab.progress import Progress
from ...lab.provenance import provenance
from .halving import survivors
from .models import model_folder, model_problem
from .prepare import CompareJob
from .results import BASELINE, CompareResults, Run, Score, Trial
from .search import best_rate, rates, search_rate, short_steps
from .speed import ROUNDS, measure_speed
from .task import tuning_steps
from .train import train_and_judge

DEFAULT_POSITIONS = ("none", "sinusoidal", "learned", "rope", "t5", "shaw", "tisa", "learned+tisa")
QUICK_POSITIONS = ("none", "learned", "rope", "tisa")
DEFAULT_STEPS = 1800
QUICK_STEPS = 400


def compare(job: CompareJob, out: Path, progress: Progress, *, speed: bool = True, jobs: int = 1) -> CompareResults:
    """Find each method's learning rate, train and judge it with every seed, ``jobs`` at a time, then measure speed.

    ``out/results.json`` is written at the start and after every search and run. Those that it already holds are not
    repeated, if their models are as they were saved. A method whose loss stops being a number is left out, with the
    reason in ``failed``, and the others go on.

    Raises:
        InputError: if ``out`` holds results for other settings.
    """
    held_out = HeldOut(job.text.held_out, HELD_OUT_RATE, job.text.vocab_size)
    work = _Work(job, held_out, out, progress, jobs)
    results = _so_far(work)
    missing = _missing(work, results)
    if missing:
        results = replace(results, **provenance(job.device))
    results.write(work.file)
    searched = [name for name in dict.fromkeys(name for name, _ in missing) if name not in results.trials]
    searched = searched if len(job.settings.rate_factors) > 1 else []
    timed = not speed or results.speed.keys() >= set(job.positions)
    rounds = 0 if timed else ROUNDS + len({BASELINE, *job.positions})
    trials = len(searched) * len(job.settings.rate_factors) * short_steps(job.settings)
    progress.start(len(missing) * work.steps_per_run + trials + rounds * len(job.positions))
    every = len(job.positions) * len(job.seeds)
    if not missing:
        progress.line(f"all {every} runs are already done")
    elif len(missing) < every:
        progress.line(f"{every - len(missing)} of {every} runs are already done; continuing with the others")
    results = _search(work, results, searched)
    for number, seed in enumerate(job.seeds):
        results = _drop(work, results, job.seeds[:number], missing)
        results = _train_all(work, results, [task for task in missing if task[1] == seed], missing)
    if not timed:
        progress.begin("speed and memory")
        measured = measure_speed(job, lambda: progress.step(len(job.positions)))
        results = replace(results, speed={**results.speed, **measured})
    results.write(work.file)
    return results


Task = tuple[str, int]
"""A method and a seed."""


@dataclass(frozen=True)
class _Work:
    """What all parts of a comparison need."""

    job: CompareJob
    held_out: HeldOut
    out: Path
    progress: Progress
    jobs: int

    @property
    def file(self) -> Path:
        return self.out / "results.json"

    @property
    def judging(self) -> int:
        """Steps that take about as long as judging a run."""
        return max(1, self.job.settings.steps // 10)

    @property
    def steps_per_run(self) -> int:
        return self.job.settings.steps + tuning_steps(self.job.settings, self.job.rows) + self.judging


def _so_far(work: _Work) -> CompareResults:
    """Return the results that the folder holds, or empty ones."""
    job = work.job
    earlier = CompareResults.earlier(work.out, settings=job.settings)
    found = earlier or CompareResults(settings=job.settings, runs={}, text=job.text.facts, predicted_tokens=0, speed={})
    return replace(
        found,
        text=job.text.facts,
        predicted_tokens=int((work.held_out.labels != IGNORED).sum()),
        budget=job.budget or found.budget,
        task=None if job.rows is None else job.rows.facts,
        failed={},
        dropped={},
    )


def _missing(work: _Work, results: CompareResults) -> list[Task]:
    """Return the methods and seeds without a run, or without the model of the run."""
    missing = []
    for seed in work.job.seeds:
        for name in work.job.positions:
            if results.run(name, seed) is None:
                missing.append((name, seed))
            elif (problem := model_problem(work.out, work.job.settings, name, seed)) is not None:
                folder = model_folder(work.out, name, seed)
                work.progress.line(f"training {name} with seed {seed} again: {folder}: {problem}")
                missing.append((name, seed))
    return missing


def _search(work: _Work, results: CompareResults, names: Sequence[str]) -> CompareResults:
    """Try the learning rates with each of these methods."""
    for name, trials in spread(partial(_try_rates, work.job), names, work.jobs, work.progress):
        results = replace(results, trials={**results.trials, name: trials})
        results.write(work.file)
        tried = ", ".join(
            f"{each.rate:g}: " + (f"{each.loss:.3f}" if each.loss is not None else "diverged") for each in trials
        )
        work.progress.line(f"{name}, short trainings by learning rate: {tried}")
    return results


def _try_rates(job: CompareJob, name: str, progress: Progress) -> list[Trial]:
    progress.begin(f"{name} (learning rate)")
    return search_rate(job, name, lambda loss: progress.step(1, f"loss {loss:.2f}"))


def _rate(work: _Work, results: CompareResults, name: str) -> float | None:
    """Return a method's learning rate; None if it diverged with all of them."""
    settings = work.job.settings
    tried = rates(settings)
    return tried[0] if len(tried) == 1 else best_rate(results.trials.get(name, []), settings.learning_rate)


def _drop(work: _Work, results: CompareResults, seeds: Sequence[int], missing: Sequence[Task]) -> CompareResults:
    """Leave out methods after the runs with ``seeds``, if the job says so."""
    if not (work.job.halving and seeds):
        return results
    going_on = {
        name: {seed: run for seed, run in results.runs.get(name, {}).items() if seed in seeds}
        for name in work.job.positions
        if name not in results.dropped and name not in results.failed
    }
    kept = survivors({name: runs for name, runs in going_on.items() if runs})
    lost = [name for name in going_on if name not in kept]
    if lost:
        rest = [task for task in missing if task[0] in lost and task[1] > seeds[-1]]
        work.progress.step(len(rest) * work.steps_per_run)
        work.progress.line(f"left out from here on, since clearly worse than the others: {', '.join(lost)}")
    results = replace(results, dropped={**results.dropped, **dict.fromkeys(lost, len(seeds))})
    results.write(work.file)
    return results


def _train_all(work: _Work, results: CompareResults, tasks: Sequence[Task], missing: Sequence[Task]) -> CompareResults:
    """Train and judge methods that go on, each with one seed."""
    numbered = []
    failed = dict(results.failed)
    for name, seed in tasks:
        if name in results.dropped or name in failed:
            continue
        rate = _rate(work, results, name)
        if rate is None:
            tried = [f"{each:g}" for each in rates(work.job.settings)]
            failed[name] = (
                f"the loss of {name!r} is not a number at any of {', '.join(tried)}; "
                f"try {min(rates(work.job.settings)) / 4:g}"
            )
            continue
        label = f"{name} ({missing.index((name, seed)) + 1}/{len(missing)})"
        numbered.append((name, seed, rate, label))
    results = replace(results, failed=failed)
    train = partial(_train, work.job, work.held_out, work.out)
    for (name, seed, _, _), run in spread(train, numbered, work.jobs, work.progress):
        if isinstance(run, str):
            results = replace(results, failed={**results.failed, name: run})
            work.progress.line(f"{name}, seed {seed}: {run}")
            continue
        results = results.with_run(name, seed, run)
        results.write(work.file)
        work.progress.step(work.judging)
        score = run.scores[work.job.settings.length]
        assert isinstance(score, Score)  # a method that can't read the training length fails in training
        labels = "" if run.task is None else f"score of the labels {run.task.score:.3f}, "
        work.progress.line(
            f"{name}, seed {seed}: {labels}held-out loss {score.loss:.3f}, accuracy {score.accuracy:.1%}, "
            f"{run.seconds:.0f} s"
        )
    results.write(work.file)
    return results


def _train(
    job: CompareJob, held_out: HeldOut, out: Path, task: tuple[str, int, float, str], progress: Progress
) -> Run | str:
    """Train and judge a method with a seed, or return why its loss is not a number. The task also has its label."""
    name, seed, rate, label = task
    progress.begin(label)

    def on_step(loss: float) -> None:
        progress.step(1, f"loss {loss:.2f}")

    try:
        return train_and_judge(job, name, seed, rate, held_out, on_step, model_folder(out, name, seed))
    except InputError as error:
        if error.field != "learning_rate":  # that names a loss that is not a number
            raise
        return error.reason
