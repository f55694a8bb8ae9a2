"""From results to a ranking that claims no more than the numbers carry."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

SEED_NOISE = 0.11
"""Nats by which another seed may change the gap between two methods: twice the standard deviation of a gap over seeds
at the default sizes, as ``benchmarks/seed_noise.py`` found. With one seed a smaller gap is not a result."""


@dataclass(frozen=True)
class Cell:
    """A median over seeds with its range, or why there is no number."""

    median: float | None
    low: float | None = None
    high: float | None = None
    why_not: str = ""

    @staticmethod
    def of(values: Sequence[float]) -> Cell:
        """From one number a seed."""
        return Cell(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One method of the comparison.

    ``rank`` is one more than the number of methods that are clearly better; it never falls as the loss rises.
    """

    rank: int
    position: str
    seeds: int
    loss: dict[int, Cell]
    accuracy: Cell
    relative_speed: Cell
    peak_memory: int | None
    positional_parameters: int


def clearly_better(better: dict[str, dict[str, Any]], worse: dict[str, dict[str, Any]]) -> bool:
    """Whether one method's runs beat the other's by more than chance explains.

    The gap has to be there with every common seed, and its mean has to exceed twice its standard error over the
    held-out text, and what another seed may change: :data:`SEED_NOISE` divided by the root of their number.

    Args:
        better, worse: seed -> run, as in ``results.json``.
    """
    gaps = [
        [loss - best for best, loss in zip(better[seed]["window_losses"], worse[seed]["window_losses"], strict=True)]
        for seed in better
        if seed in worse
    ]
    if not gaps:
        return False
    means = [statistics.fmean(gap) for gap in gaps]
    if min(means) <= 0:
        return False
    pooled = [statistics.fmean(window) for window in zip(*gaps, strict=True)]
    error = statistics.stdev(pooled) / len(pooled) ** 0.5 if len(pooled) > 1 else 0.0
    return statistics.fmean(means) > max(2 * error, SEED_NOISE / len(means) ** 0.5)


def rank(results: dict[str, Any]) -> list[Row]:
    """The rows of the table, best first."""
    length = results["settings"]["length"]
    runs: dict[str, dict[str, dict[str, Any]]] = {name: by_seed for name, by_seed in results["runs"].items() if by_seed}
    rows = []
    for name, by_seed in runs.items():
        cells = {}
        for tried in next(iter(by_seed.values()))["scores"]:
            scores = [run["scores"][tried] for run in by_seed.values()]
            cannot = next((score["cannot"] for score in scores if "cannot" in score), None)
            if cannot is None:
                cells[int(tried)] = Cell.of([score["loss"] for score in scores])
            else:
                cells[int(tried)] = Cell(None, why_not=cannot)
        speed = results.get("speed", {}).get(name)
        rows.append(
            Row(
                rank=1 + sum(clearly_better(other, by_seed) for rival, other in runs.items() if rival != name),
                position=name,
                seeds=len(by_seed),
                loss=cells,
                accuracy=Cell.of([run["scores"][str(length)]["accuracy"] for run in by_seed.values()]),
                relative_speed=Cell(speed["relative_speed"], speed["lowest"], speed["highest"])
                if speed
                else Cell(None, why_not="not measured"),
                peak_memory=speed["peak_memory"] if speed else None,
                positional_parameters=next(iter(by_seed.values()))["positional_parameters"],
            )
        )
    rows.sort(key=lambda row: row.loss[length].median or float("inf"))
    ranks = accumulate((row.rank for row in rows), max)
    return [replace(row, rank=own) for row, own in zip(rows, ranks, strict=True)]


def verdict(rows: Sequence[Row], results: dict[str, Any]) -> str:
    """The result in a sentence; ``rows`` as :func:`rank` made them from ``results``."""
    best = [row.position for row in rows if row.rank == 1]
    loss = rows[0].loss[results["settings"]["length"]].median
    if loss is None or loss >= results["text"]["unigram_entropy"]:
        return "No method predicts better than guessing by frequency yet; train longer (--steps)."
    if len(rows) == 1:
        return f"Only {best[0]} was tried."
    if len(best) == len(rows):
        return "The methods can't be told apart; train longer (--steps) or with more seeds (--seeds)."
    if len(best) == 1:
        return f"{best[0]} predicts this text best."
    return f"{', '.join(best[:-1])} and {best[-1]} predict this text best; they can't be told apart."
