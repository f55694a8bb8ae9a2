"""Turn fine-tuning results into the TISA paper's table: medians over seeds, gains and error reductions."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ...lab.seeds import Spread
from .results import FinetuneResults
from .variants import BASELINE, settings_of


@dataclass(frozen=True)
class GainRow:
    """One task, with the name of the test set if it has several, and one metric."""

    task: str
    metric: str
    cells: list[Spread | None]
    """The scores in percent, one per column; None where nothing has been run."""
    gain: float | None = None
    """The largest gain over the baseline, in points."""
    error_reduction: float | None = None
    """That gain divided by the baseline's distance from 100, in percent."""
    clear: bool = False
    """Whether every seed with the gain is better than every seed of the baseline; never True with one seed."""


@dataclass(frozen=True)
class GainsTable:
    """The table of one setting: its position method, the names of its columns, and its rows."""

    position: str
    columns: list[str]
    rows: list[GainRow]


def gain_over(baseline: float, others: list[float]) -> tuple[float, float | None]:
    """Return the largest gain in points and the relative error reduction, ``100 * gain / (100 - baseline)``.

    This follows Table 3 of Wennberg & Henter (2021): from 57.2 to 58.5 is a gain of 1.3 points, 3.0% of the error.
    Both are negative if everything is worse than the baseline. The reduction is None if the baseline has no errors.

    Args:
        baseline: the baseline's score in percent.
        others: the other scores in percent, at least one.
    """
    gain = max(others) - baseline
    return gain, None if baseline == 100 else 100 * gain / (100 - baseline)


def tables(results: FinetuneResults) -> list[GainsTable]:
    """Return the table of every setting that was requested and has runs."""
    found = []
    for setting in settings_of(results.shown.positions, results.shown.kernels):
        columns = [variant.label for variant in setting.variants]
        rows = []
        for task, facts in results.tasks.items():
            seeds = [results.by_seed(task, variant.name) for variant in setting.variants]
            for judged in facts.judged:
                for metric in facts.metrics:
                    scores = [[100 * run.scores[judged][metric] for run in runs] for runs in seeds]
                    rows.append(_row(f"{task} {judged}".strip(), metric, scores, columns[0] == BASELINE))
        if rows := [row for row in rows if any(row.cells)]:
            found.append(GainsTable(setting.position, columns, rows))
    return found


def _row(task: str, metric: str, scores: list[list[float]], has_baseline: bool) -> GainRow:
    """Make a row from the scores of every column; the baseline's column is first if there is one."""
    cells = [Spread.of(column) if column else None for column in scores]
    baseline, others = scores[0], [column for column in scores[1:] if column]
    if not (has_baseline and baseline and others):
        return GainRow(task, metric, cells)
    gain, reduction = gain_over(median(baseline), [median(column) for column in others])
    best = max(others, key=median)
    clear = min(len(baseline), len(best)) > 1 and min(best) > max(baseline)
    return GainRow(task, metric, cells, gain, reduction, clear)
