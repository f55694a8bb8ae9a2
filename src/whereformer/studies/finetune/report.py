"""The plan, the tables and the pages of fine-tuning: gains from position, and what the heads learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...lab.report import figures, heads, page
from ...lab.report.numbers import DASH, MINUS, decimals
from ...lab.seeds import Spread
from ...lab.sheet import Cell, Column, Sheet
from .gains import GainRow, GainsTable, tables
from .results import FinetuneResults, TaskFacts

if TYPE_CHECKING:
    from .prepare import Checked
    from .run import FinetuneJob

TEMPLATE = Path(__file__).with_suffix(".html.j2")


def plan(job: FinetuneJob, checked: Checked) -> Sheet:
    """Return the tasks and models of a fine-tuning before it starts."""
    rows = []
    for name, encoded in checked.tasks.items():
        facts, tokens = encoded.facts, encoded.facts.tokens_of_a_row
        counts = ", ".join(f"{split} {count:,}" for split, count in facts.rows.items())
        lengths = f"median {tokens['median']} tokens, longest {tokens['most']}"
        rows.append((name, f"{counts} rows from {facts.source}; {lengths}; {job.steps(encoded):,} steps per run"))
        rows += [("", note) for note in _notes_on(facts, job.tuning.max_length)]
    for name, count in checked.parameters.items():
        # Say so if another method replaces trained positions.
        fresh = f", {count.fresh:,} of them new" if count.fresh else ""
        rows.append((name, f"{count.all:,} parameters, {count.position:,} of position{fresh}"))
    parts = (len(checked.tasks), "task"), (len(checked.parameters), "model"), (len(job.seeds), "seed")
    named = ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for number, word in parts)
    runs = len(checked.tasks) * len(checked.parameters) * len(job.seeds)
    rows.append(("runs", f"{runs}: {named}"))
    return Sheet.of("Plan", ["", Column("", left=True, wraps=True)], rows)


def _notes_on(facts: TaskFacts, max_length: int | None) -> list[str]:
    """Return caveats about the scores of a task: partial data and truncated rows."""
    notes = []
    if facts.subsets:
        rows = ", ".join(f"{split} {facts.rows[split]:,} rows" for split in facts.subsets)
        notes.append(f"only part of the official data ({rows}); do not compare with published scores")
    if facts.cut_rows:
        notes.append(f"{facts.cut_rows:,} rows were truncated to {max_length} tokens")
    return notes


def sheets(results: FinetuneResults) -> list[Sheet]:
    """Return the tables, laid out as in the TISA paper; the last says how to read them all."""
    found = [_sheet(table) for table in tables(results)]
    seeds = results.shown.seeds
    explanation = (
        f"Scores in percent{f', medians over {len(seeds)} seeds with their range' if len(seeds) > 1 else ''}. Gain is "
        "the largest gain over the baseline, in points. Error reduction is that gain divided by the baseline's "
        "distance from 100. * means that every seed is better than every seed of the baseline; other gains may be "
        "chance."
    )
    return [*found[:-1], *(replace(last, notes=(explanation,)) for last in found[-1:])]


def _sheet(table: GainsTable) -> Sheet:
    """Return the table of one position method: its scores, its gain and the share of errors that it removes."""
    numbers = [Column(name, first="descending") for name in (*table.columns, "gain", "error reduction")]
    columns = [Column("task"), Column("metric", left=True), *numbers]
    title = f"{table.position}: scores in percent"
    return Sheet.of(title, columns, [_cells(row) for row in table.rows], sortable=True, kind="tasks")


def _cells(row: GainRow) -> list[Cell]:
    """Return the cells of a task and metric. The best median is bold."""
    medians = [cell.median for cell in row.cells if cell is not None and cell.median is not None]
    best = max(medians) if len(medians) > 1 else None
    return [
        Cell(row.task, order=row.task),
        Cell(row.metric, order=row.metric),
        *(_score(cell or Spread(None), best) for cell in row.cells),
        Cell(_signed(row.gain) + ("*" if row.clear else ""), order=row.gain),
        Cell(_signed(row.error_reduction, "%"), order=row.error_reduction),
    ]


def _score(cell: Spread, best: float | None) -> Cell:
    low, high = decimals(cell.low, 1), decimals(cell.high, 1)
    spread = "" if cell.low == cell.high else f"{low}{DASH}{high}"
    bold = cell.median is not None and cell.median == best
    return Cell(decimals(cell.median, 1), spread, cell.median, style="font-weight: bold" if bold else "")


def _signed(number: float | None, unit: str = "") -> str:
    return DASH if number is None else f"{number:+z.1f}{unit}".replace("-", MINUS)


def sentences(results: FinetuneResults) -> list[str]:
    """Return what the gains say, and caveats about the scores."""
    length = results.settings.max_length
    notes = [f"{name}: {note}" for name, facts in results.tasks.items() for note in _notes_on(facts, length)]
    return [_verdict(tables(results)), *notes]


def _verdict(found: Sequence[GainsTable]) -> str:
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


def build_markdown(results: FinetuneResults) -> str:
    """Build the report as Markdown."""
    lines = [f"# {results.model}, fine-tuned", ""]
    for each in sheets(results):
        lines += [f"## {each.title}", "", *each.markdown(), "", *each.notes, ""]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(results.settings).items())
    return "\n".join([*lines, *(f"- {note}" for note in sentences(results)[1:]), "", f"Settings: {settings}.", ""])


def _drawings(results: FinetuneResults) -> list[dict[str, Any]]:
    """Draw the curves of the last run of every task and position method."""
    positions = results.shown.positions
    looks = dict(zip(positions, figures.series(len(positions)), strict=True))
    found: list[dict[str, Any]] = []
    for task, by_position in results.curves.items():
        for position in (each for each in by_position if each in looks):
            kept = by_position[position]
            label = f"What {kept.variant} adds to scores after {task}, per head and offset"
            drawing = heads.offset_curves(kept.heads, looks[position], f"curves-{len(found)}", label)
            title = f"{task}, {kept.variant}, seed {kept.seed}"
            found.append({"title": title, "drawing": drawing, "wide": len(kept.heads[0]) > 6})
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
        sheets=sheets(results),
        heads=_drawings(results),
        seeds=results.shown.seeds,
        tasks=list(results.tasks),
        facts_of={
            "Settings": asdict(results.settings),
            **{name: _facts(facts) for name, facts in results.tasks.items()},
            "Machine": {**results.machine, **results.versions},
        },
        command="",
    )
