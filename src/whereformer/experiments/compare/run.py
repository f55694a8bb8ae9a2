"""Run a comparison: train the same small encoder with each position method, score it, and measure speed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...data.masks import HELD_OUT_RATE, IGNORED, HeldOut
from ...runs.jobs import spread
from ...runs.progress import Progress
from ...runs.provenance import provenance
from .models import model_folder, model_problem
from .prepare import CompareJob
from .results import BASELINE, CompareResults, Run, Score, earlier_results
from .speed import ROUNDS, measure_speed
from .train import train_and_judge

DEFAULT_POSITIONS = ("none", "sinusoidal", "learned", "rope", "t5", "shaw", "tisa", "learned+tisa")
QUICK_POSITIONS = ("none", "learned", "rope", "tisa")
DEFAULT_STEPS = 2400
QUICK_STEPS = 400


def compare(job: CompareJob, out: Path, progress: Progress, *, speed: bool = True, jobs: int = 1) -> CompareResults:
    """Train and judge every method with every seed, ``jobs`` at a time, then measure speed.

    ``out/results.json`` is written after every run. Runs that it already holds are not repeated, if their models are as
    they were saved.

    Raises:
        InputError: if a loss stops being a number, or ``out`` holds results for other settings.
    """
    held_out = HeldOut(job.text.held_out, HELD_OUT_RATE, job.text.vocab_size)
    earlier = earlier_results(out, job.settings)
    results = CompareResults(
        settings=job.settings,
        runs={} if earlier is None else earlier.runs,
        text=job.text.facts,
        predicted_tokens=int((held_out.labels != IGNORED).sum()),
        speed={} if earlier is None else earlier.speed,
        **provenance(job.device),
    )
    every = [(name, seed) for seed in job.seeds for name in job.positions]
    missing = []
    for name, seed in every:
        if results.run(name, seed) is None:
            missing.append((name, seed))
        elif (problem := model_problem(out, job.settings, name, seed)) is not None:
            progress.line(f"training {name} with seed {seed} again: {model_folder(out, name, seed)}: {problem}")
            missing.append((name, seed))
    # Judging a run takes about a tenth as long as training it; a speed round counts as one step per method.
    judging = max(1, job.settings.steps // 10)
    timed = not speed or results.speed.keys() >= set(job.positions)
    rounds = 0 if timed else ROUNDS + len({BASELINE, *job.positions})
    progress.start(len(missing) * (job.settings.steps + judging) + rounds * len(job.positions))
    if len(missing) < len(every):
        progress.line(f"{len(every) - len(missing)} of {len(every)} runs are already done; continuing with the others")
    numbered = [(name, seed, f"{name} ({number}/{len(missing)})") for number, (name, seed) in enumerate(missing, 1)]
    for (name, seed, _), run in spread(partial(_train, job, held_out, out), numbered, jobs, progress):
        results = results.with_run(name, seed, run)
        results.save(out / "results.json")
        progress.step(judging)
        score = run.scores[job.settings.length]
        assert isinstance(score, Score)  # a method that can't read the training length fails in training
        progress.line(
            f"{name}, seed {seed}: held-out loss {score.loss:.3f}, accuracy {score.accuracy:.1%}, {run.seconds:.0f} s"
        )
    if not timed:
        progress.begin("speed and memory")
        measured = measure_speed(job, lambda: progress.step(len(job.positions)))
        results = replace(results, speed={**results.speed, **measured})
    results.save(out / "results.json")
    return results


def _train(job: CompareJob, held_out: HeldOut, out: Path, task: tuple[str, int, str], progress: Progress) -> Run:
    """Train and judge a method with a seed; the task also has its label."""
    name, seed, label = task
    progress.begin(label)
    return train_and_judge(
        job, name, seed, held_out, lambda loss: progress.step(1, f"loss {loss:.2f}"), model_folder(out, name, seed)
    )
