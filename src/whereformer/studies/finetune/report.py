"""The plan, the tables and the pages of fine-tuning: gains from position, and what the heads learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ...lab.report import figures, heads, page
from ...lab.report.numbers import DASH, MINUS, decimals
from ...lab.seeds import Spread
from ...lab.sheet import Cell, Column, Row, Sheet
from .gains import GainRow, GainsTable, tables
from .results import FinetuneResults, TaskFacts

if TYPE_CHECKING:
    from .prepare import Checked
    from .run import FinetuneJob

TEMPLATE = Path(__file__).with_suffix(".html.j2")
BEST = "font-weight: bold"


def plan(job: FinetuneJob, checked: Checked) -> Sheet:
    """Return the tasks and models of a fine-tuning before it starts."""
    rows = []
    for name, encoded in checked.tasks.items():
        facts, tokens = encoded.facts(), encoded.facts().tokens_of_a_row
        counts = ", ".join(f"{split} {count:,}" for split, count in facts.rows.items())
        lines = [
            f"{counts} rows from {facts.source}; median {tokens['median']} tokens, longest {tokens['most']}; "
            f"{job.steps(encoded):,} steps per run"
        ]
        if facts.subsets:
            lines.append(f"only part of {', '.join(facts.subsets)}: do not compare with published scores")
        if facts.cut_rows:
            lines.append(f"{facts.cut_rows:,} rows truncated to {job.tuning.max_length} tokens")
        rows += [(name if index == 0 else "", line) for index, line in enumerate(lines)]
    for name, count in checked.parameters.items():
        # Say so if another method replaces trained positions.
        fresh = f", {count.fresh:,} of them new" if count.fresh else ""
        rows.append((name, f"{count.all:,} parameters, {count.position:,} of position{fresh}"))
    parts = (len(checked.tasks), "task"), (len(checked.parameters), "model"), (len(job.seeds), "seed")
    named = ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for number, word in parts)
    runs = len(checked.tasks) * len(checked.parameters) * len(job.seeds)
    rows.append(("runs", f"{runs}: {named}"))
    return Sheet.of("Plan", ["", Column("", left=True, wraps=True)], rows)


def sheets(results: FinetuneResults) -> list[Sheet]:
    """Return the tables, laid out as in the TISA paper; the last says how to read them all."""
    found = tables(results)
    last = len(found) - 1
    return [sheet(table, (explanation(results),) if index == last else ()) for index, table in enumerate(found)]


def sheet(table: GainsTable, notes: tuple[str, ...] = ()) -> Sheet:
    """Return the table of one position method: its scores, its gain and the share of errors that it removes."""
    numbers = [Column(name, first="descending") for name in (*table.columns, "gain", "error reduction")]
    columns = [Column("task"), Column("metric", left=True), *numbers]
    rows = [Row(cells(row)) for row in table.rows]
    return Sheet.of(f"{table.position}: scores in percent", columns, rows, notes=notes, sortable=True, kind="tasks")


def cells(row: GainRow) -> tuple[Cell, ...]:
    """Return the cells of a task and metric. The best median is bold."""
    medians = [None if cell is None else cell.median for cell in row.cells]
    numbers = [median for median in medians if median is not None]
    best = max(numbers) if len(numbers) > 1 else None
    return (
        Cell(row.task, order=row.task),
        Cell(row.metric, order=row.metric),
        *(
            Cell(_median(cell), _range(cell), median, style=BEST if median is not None and median == best else "")
            for cell, median in zip(row.cells, medians, strict=True)
        ),
        Cell(_signed(row.gain) + ("*" if row.clear else ""), order=row.gain),
        Cell(_signed(row.error_reduction, "%"), order=row.error_reduction),
    )


def build_markdown(results: FinetuneResults) -> str:
    """Build the report as Markdown."""
    lines = [f"# {results.model}, fine-tuned", ""]
    for each in tables(results):
        lines += [f"## {each.position}", "", *sheet(each).markdown(), ""]
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


def _median(cell: Spread | None) -> str:
    return DASH if cell is None or cell.median is None else f"{cell.median:.1f}"


def _range(cell: Spread | None) -> str:
    if cell is None or cell.low is None or cell.high is None or cell.low == cell.high:
        return ""
    return f"{decimals(cell.low, 1)}{DASH}{decimals(cell.high, 1)}"


def _signed(number: float | None, unit: str = "") -> str:
    return DASH if number is None else f"{number:+z.1f}{unit}".replace("-", MINUS)


def sentences(results: FinetuneResults) -> list[str]:
    """Return what the gains say, and caveats about the scores."""
    return [verdict(tables(results)), *_notes(results)]


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


def build_report(results: FinetuneResults) -> str:
    """Build the page. Equal results give identical pages."""
    return page.render(
        TEMPLATE,
        title="What does position add to a pretrained model?",
        sentences=sentences(results),
        model=results.model,
        sheets=[(table.position, sheet(table)) for table in tables(results)],
        explanation=explanation(results),
        heads=drawings(results),
        seeds=results.shown.seeds,
        tasks=list(results.tasks),
        facts_of={
            "Settings": asdict(results.settings),
            **{name: _facts(facts) for name, facts in results.tasks.items()},
            "Machine": {**results.machine, **results.versions},
        },
        command="",
    )
