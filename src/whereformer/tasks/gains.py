"""From results to the table of the TISA paper: medians over seeds, the largest gain and what share of errors it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .ranking import Cell
from .variants import BASELINE, settings_of


@dataclass(frozen=True)
class Row:
    """One task and metric.

    Args:
        task, metric: their names; a task with several test sets names one.
        cells: the scores in percent, one a column; None where nothing has been run.
        gain: the largest gain over the baseline, in points.
        error_reduction: that gain by the baseline's distance from 100, in percent.
        clear: whether every seed of what gains is better than every seed of the baseline; never with one seed.
    """

    task: str
    metric: str
    cells: list[Cell | None]
    gain: float | None
    error_reduction: float | None
    clear: bool = False


@dataclass(frozen=True)
class Table:
    """A setting: its position method, what its columns are, and the rows."""

    position: str
    columns: list[str]
    rows: list[Row]


def gain_over(baseline: float, others: list[float]) -> tuple[float, float | None]:
    """The largest gain, and the relative error reduction: ``100 * gain / (100 - baseline)``.

    As in Table 3 of Wennberg & Henter (2021), all in percent: from 57.2 to 58.5 are 1.3 points, 3.0% of the error. Both
    are negative where everything is worse than the baseline; there is no reduction of no error.

    Args:
        baseline: its score.
        others: the other scores, at least one.
    """
    gain = max(others) - baseline
    return gain, None if baseline == 100 else 100 * gain / (100 - baseline)


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The table of every setting, from the content of ``results.json``."""
    shown = results["shown"]
    found = []
    for setting in settings_of(shown["positions"], shown["kernels"]):
        rows = []
        for task, facts in results["tasks"].items():
            runs = results["runs"].get(task, {})
            for judged in facts["judged"]:
                for metric in facts["metrics"]:
                    cells = [
                        _cell(runs.get(variant.name, {}), judged, metric, shown["seeds"])
                        for variant in setting.variants
                    ]
                    rows.append(_row(f"{task} {judged}".strip(), metric, cells, setting.variants[0].label))
        rows = [row for row in rows if any(row.cells)]
        found.append(Table(setting.position, [variant.label for variant in setting.variants], rows))
    return [table for table in found if table.rows]


def _cell(by_seed: Mapping[str, Any], judged: str, metric: str, seeds: list[int]) -> Cell | None:
    scores = [100 * by_seed[str(seed)]["scores"][judged][metric] for seed in seeds if str(seed) in by_seed]
    return Cell.of(scores) if scores else None


def _row(task: str, metric: str, cells: list[Cell | None], first: str) -> Row:
    baseline, *others = ((cell, cell.median) if cell is not None else (None, None) for cell in cells)
    found = [(median, cell) for cell, median in others if cell is not None and median is not None]
    if first != BASELINE or baseline[0] is None or baseline[1] is None or not found:
        return Row(task, metric, cells, None, None)
    _, best = max(found, key=lambda each: each[0])
    gain, reduction = gain_over(baseline[1], [median for median, _ in found])
    low, (lowest, highest) = best.low, (baseline[0].low, baseline[0].high)
    assert low is not None
    assert lowest is not None
    assert highest is not None
    return Row(task, metric, cells, gain, reduction, clear=lowest < highest < low)
