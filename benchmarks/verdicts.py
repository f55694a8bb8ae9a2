"""How often do verdicts hold? Compare stored runs with longer ones, or with other seeds or texts, and count.

Run: .venv/bin/python benchmarks/verdicts.py SHORT LONG [SHORT LONG ...]

SHORT and LONG are folders of the same command, ``whereformer compare`` or ``whereformer probe``; the next command that
a report advises makes a LONG. Of a short comparison with several seeds, each seed counts as a comparison, too. Counted
are the rules of ``whereformer.analysis.ranking`` and of probes. Other rules claim nothing about longer runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, ClassVar

from benchmark import Benchmark, main
from rich.console import Console

from whereformer.analysis.ranking import Models, clearly_better, rank
from whereformer.analysis.verdicts import BASELINE, PROBE_STEPS, find_counting_tasks
from whereformer.errors import InputError
from whereformer.lab.recipe import RECIPE
from whereformer.lab.run import RECORDS, read_records
from whereformer.recipes.compare import load
from whereformer.recipes.probe import CellResult, ProbeResult


@dataclass(frozen=True, kw_only=True)
class Verdicts(Benchmark):
    """Count how often the verdicts of short runs held in long ones."""

    FLAGS: ClassVar = {"folders": "FOLDERS"}

    folders: tuple[Path, ...]
    """A short and a long run, or several such pairs."""
    out: Path = Path("runs/verdicts.json")

    def measure(self, console: Console) -> dict[str, Any]:
        if len(self.folders) % 2:
            raise InputError("folders", f"expected pairs of a short and a long run, got {len(self.folders)} folders")
        counts: dict[str, Counter[str]] = {}
        for short, long in zip(self.folders[::2], self.folders[1::2], strict=True):
            is_probe = read_records(short / RECORDS)[0][RECIPE] == "probe"
            for verdict, outcome in (check_probe if is_probe else check_comparison)(short, long):
                counts.setdefault(verdict, Counter())[outcome] += 1
        for verdict, outcomes in counts.items():
            parts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
            console.print(f"{verdict} ({outcomes.total()}): {parts}", highlight=False, soft_wrap=True)
        return {"verdicts": counts}


def check_comparison(short: Path, long: Path) -> Iterator[tuple[str, str]]:
    """Yield the verdicts of a comparison with all of its seeds and with each of them, and what became of them."""
    (recipe, first), (_, later) = load(short), load(long)
    names, seeds = first.keys() & later.keys(), {seed for models in first.values() for seed in models}
    for chosen in [seeds, *({seed} for seed in seeds if len(seeds) > 1)]:
        models = {name: {seed: first[name][seed] for seed in chosen} for name in names}
        final = {name: later[name] for name in names}
        for verdict, outcome in compare_rankings(models, final, None if recipe.causal else BASELINE, recipe.steps):
            yield f"{len(chosen)} seed{'s' * (len(chosen) > 1)}: {verdict}", outcome


def compare_rankings(
    short: Mapping[str, Models], long: Mapping[str, Models], baseline: str | None, steps: int
) -> Iterator[tuple[str, str]]:
    """Yield the verdicts of a ranking after ``steps`` steps, and what became of them in a longer comparison."""
    first, later = rank(short, baseline, steps), rank(long, baseline, steps)
    for better, worse in permutations(short, 2):
        if clearly_better(short[better], short[worse]):
            is_open = (better, worse) in first.unsettled or worse in first.not_learning
            outcome = "reversed" if clearly_better(long[worse], long[better]) else "too close to tell"
            outcome = "still clear" if clearly_better(long[better], long[worse]) else outcome
            yield "a gap that may close" if is_open else "a settled gap", outcome
    for pair in combinations([row.position for row in first.ranked], 2):
        was_clear, is_clear = (
            any(clearly_better(models[better], models[worse]) for better, worse in permutations(pair))
            for models in (short, long)
        )
        if not was_clear:
            yield "two methods that are too close to rank", "one is clearly better" if is_clear else "still too close"
    for name in short:
        if name in first.not_learning:
            yield "a method that is not learning yet", "still not" if name in later.not_learning else "has learned"
        verdict = "may catch up" if name in first.rivals else "is left out"
        verdict = "is to take" if name in first.best else verdict
        yield f"a method that {verdict}", "among the best" if name in later.best else "not among the best"


def check_probe(short: Path, long: Path) -> Iterator[tuple[str, str]]:
    """Yield the verdicts of a probe at the training length, and what became of them."""
    first, later = find_solved(short), find_solved(long)
    steps = read_records(short / RECORDS)[0]["steps"]
    names, tasks = first.keys() & later.keys() - {BASELINE}, find_counting_tasks(first)
    counts, later_counts = (
        {name: sum(solved[name][task] for task in tasks) for name in names} for solved in (first, later)
    )
    for name in names:
        for task in tasks:
            verdict = f"a task that a method {'solves' if first[name][task] else 'fails'}"
            yield verdict, "solved" if later[name][task] else "failed"
        if counts[name] == max(counts.values()):
            few = ", after too few steps for a verdict" if steps < PROBE_STEPS else ""
            is_best = later_counts[name] == max(later_counts.values())
            yield f"a method that solves the most tasks{few}", "still does" if is_best else "others solve more"


def find_solved(folder: Path) -> dict[str, dict[str, bool]]:
    """Return whether each method solves each task at the training length with every seed."""
    results: dict[str, dict[str, list[ProbeResult]]] = {}
    for key, record in read_records(folder / RECORDS)[1].items():
        _, _, task, name = json.loads(key)
        results.setdefault(name, {}).setdefault(task, []).append(ProbeResult(**record["value"]))
    return {
        name: {task: CellResult.of(runs, 0).is_solved for task, runs in row.items()} for name, row in results.items()
    }


if __name__ == "__main__":
    main(Verdicts)
