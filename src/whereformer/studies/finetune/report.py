"""The Markdown and HTML reports of ``whereformer finetune``: gains from position, and what the heads learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ...lab.report import figures, heads, page
from ...lab.report.numbers import DASH, MINUS, decimals
from ...lab.report.page import Cell, Column
from ...lab.seeds import Spread
from .gains import GainRow, GainsTable
from .results import FinetuneResults, TaskFacts

TEMPLATE = Path(__file__).with_suffix(".html.j2")


def build_markdown(results: FinetuneResults, tables: Sequence[GainsTable]) -> str:
    """Build the report as Markdown."""
    lines = [f"# {results.model}, fine-tuned", ""]
    for table in tables:
        header = ["task", "metric", *table.columns, "gain", "error reduction"]
        lines += [f"## {table.position}", "", _line(header), _line(["---"] * 2 + ["---:"] * (len(header) - 2))]
        for row in table.rows:
            cells = [_median(cell) + (f" ({_range(cell)})" if _range(cell) else "") for cell in row.cells]
            lines.append(_line([row.task, row.metric, *cells, _gain(row), _signed(row.error_reduction, "%")]))
        lines.append("")
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(results.settings).items())
    lines += [explanation(results), "", *(f"- {note}" for note in _notes(results)), "", f"Settings: {settings}.", ""]
    versions = ", ".join(f"{name} {value}" for name, value in results.versions.items())
    run_on = f"Run on {results.machine.get('cpu')}, {results.machine.get('threads')} threads; {versions}."
    return "\n".join([*lines, run_on, ""])


def explanation(results: FinetuneResults) -> str:
    """Explain the numbers in a table."""
    seeds = results.shown.seeds
    what = "Scores in percent" + (f", medians over {len(seeds)} seeds with their range" if len(seeds) > 1 else "")
    return (
        f"{what}. Gain is the largest gain over the baseline, in points. Error reduction is that gain divided by the "
        "baseline's distance from 100. * means that every seed is better than every seed of the baseline; other gains "
        "may be chance."
    )


def _notes(results: FinetuneResults) -> list[str]:
    """Return caveats about the scores: partial data and truncated rows."""
    notes = []
    for name, facts in results.tasks.items():
        if facts.subsets:
            rows = ", ".join(f"{split} {facts.rows[split]:,} rows" for split in facts.subsets)
            notes.append(f"{name}: only part of the official data ({rows}); do not compare with published scores")
        if facts.cut_rows:
            notes.append(f"{name}: {facts.cut_rows:,} rows were truncated to {results.settings.max_length} tokens")
    return notes


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _median(cell: Spread | None) -> str:
    return DASH if cell is None or cell.median is None else f"{cell.median:.1f}"


def _range(cell: Spread | None) -> str:
    if cell is None or cell.low is None or cell.high is None or cell.low == cell.high:
        return ""
    return f"{decimals(cell.low, 1)}{DASH}{decimals(cell.high, 1)}"


def _signed(number: float | None, unit: str = "") -> str:
    return DASH if number is None else f"{number:+z.1f}{unit}".replace("-", MINUS)


def _gain(row: GainRow) -> str:
    return _signed(row.gain) + ("*" if row.clear else "")


@dataclass(frozen=True)
class ShownRow:
    """A table row on the page: its task and metric, its cells, and which of them are best."""

    task: str
    metric: str
    cells: list[Cell]
    best: list[bool]


def shown(row: GainRow) -> ShownRow:
    """Format a row for the page."""
    medians = [None if cell is None else cell.median for cell in row.cells]
    numbers = [median for median in medians if median is not None]
    best = max(numbers) if len(numbers) > 1 else None
    cells = [
        *(Cell(_median(cell), _range(cell), median) for cell, median in zip(row.cells, medians, strict=True)),
        Cell(_gain(row), order=row.gain),
        Cell(_signed(row.error_reduction, "%"), order=row.error_reduction),
    ]
    is_best = [median is not None and median == best for median in medians]
    return ShownRow(row.task, row.metric, cells, [*is_best, False, False])


def columns(table: GainsTable) -> list[Column]:
    """Return a table's column headers and sort directions."""
    scores = [*table.columns, "gain", "error reduction"]
    return [Column("task"), Column("metric"), *(Column(name, first="descending") for name in scores)]


def verdict(found: Sequence[GainsTable]) -> str:
    """Summarize the page in one sentence, its headline."""
    gains = [
        (row.gain, table.position, f"{row.task} ({row.metric})", row.clear)
        for table in found
        for row in table.rows
        if row.gain is not None
    ]
    if not gains:
        return "Fine-tuned, with nothing to compare it with"
    gain, position, task, _ = max(gains)
    if gain <= 0:
        return "No position method gained over its baseline"
    better, clear = sum(each[0] > 0 for each in gains), sum(each[3] for each in gains)
    return (
        f"{position} gains most on {task}: {gain:.1f} points; {better} of {len(gains)} rows have a gain, {clear} of "
        "them with every seed"
    )


@dataclass(frozen=True)
class HeadsDrawing:
    """A drawing of what the heads of one run add to scores."""

    title: str
    drawing: Markup
    wide: bool


def drawings(results: FinetuneResults) -> list[HeadsDrawing]:
    """Draw the curves of the last run of every task and position method."""
    positions = results.shown.positions
    looks = dict(zip(positions, figures.series(len(positions)), strict=True))
    found: list[HeadsDrawing] = []
    for task, by_position in results.curves.items():
        for position, kept in by_position.items():
            if position not in looks:
                continue
            title = f"{task}, {kept.variant}, seed {kept.seed}"
            label = f"What {kept.variant} adds to scores after {task}, per head and offset"
            name = f"curves-{len(found)}"
            drawing = heads.offset_curves(kept.heads, looks[position], name, label)
            found.append(HeadsDrawing(title, drawing, len(kept.heads[0]) > 6))
    return found


def _facts(facts: TaskFacts) -> dict[str, Any]:
    """Format the facts about a task's rows for people."""
    found: dict[str, Any] = {}
    for name, value in asdict(facts).items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:,}" for key, number in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, filter(None, value)))
        found[name] = DASH if value in (None, "") else value
    return found


def build_report(results: FinetuneResults, tables: Sequence[GainsTable]) -> str:
    """Build the page. Equal results give identical pages."""
    return page.render(
        TEMPLATE,
        title="What does position add to a pretrained model?",
        verdict=verdict(tables),
        model=results.model,
        tables=[(table, columns(table), [shown(row) for row in table.rows]) for table in tables],
        explanation=explanation(results),
        notes=_notes(results),
        heads=drawings(results),
        settings=asdict(results.settings),
        seeds=results.shown.seeds,
        tasks={name: _facts(facts) for name, facts in results.tasks.items()},
        machine={**results.machine, **results.versions},
    )
