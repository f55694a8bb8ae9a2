"""The tables of probes, one for each length, and the HTML report with a heat map of methods and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.colors import to_hex

from ...lab.report import heatmaps, page
from ...lab.report.numbers import percent
from ...lab.sheet import Cell, Row, Sheet
from ...lab.study import command_line
from .judgment import ERRORS, SOLVED, Level, Table, tables
from .judgment import Cell as Judged
from .results import ProbeResults
from .settings import Probe
from .tasks import TASKS

TEMPLATE = Path(__file__).with_suffix(".html.j2")
BRIGHT = 0.5
"""On colors of at least this luminance, text is black."""
READING = (
    f"* solved: at least {SOLVED:.0%}. ( ): no better than guessing without positions. "
    "?: better than guessing with some seeds only. guessing: the best guess without positions."
)


def sheets(results: ProbeResults) -> list[Sheet]:
    """Return a table for each length, that of training first; the last says how to read them all."""
    found = tables(results)
    needs = [f"{task} needs: {TASKS[task].needs}" for task in (found[0].guesses if found else ())]
    last = len(found) - 1
    return [
        sheet(table, results.settings.length, (*needs, READING) if index == last else ())
        for index, table in enumerate(found)
    ]


def sheet(table: Table, trained: int, notes: Sequence[str]) -> Sheet:
    """Return the table of one length: methods and tasks, and how many tasks each method solves."""
    times = table.length // trained
    how = "as trained" if times == 1 else f"{times} times as many as trained"
    guesses = [Cell(percent(guess, 1), style=colors(guess)) for guess in table.guesses.values()]
    rows = [
        Row((Cell(name), *map(square, row.values()), Cell(f"{len(table.solved(name))}/{len(row)}")))
        for name, row in table.rows.items()
    ]
    return Sheet.of(
        f"Accuracy at {table.length} symbols, {how}",
        ["position", *table.guesses, "solved"],
        [Row((Cell("guessing"), *guesses, Cell("")), "dim"), *rows],
        notes=tuple(notes),
        kind="squares",
    )


def square(judged: Judged) -> Cell:
    """Return a method's accuracy on a task with its mark, the range over seeds below, or the reason why it has none."""
    of = judged.accuracy
    if of.median is None or of.low is None or of.high is None:
        return Cell(judged.level, title=of.why_not)
    spread = f"{percent(of.low)}\N{EN DASH}{percent(of.high)}" if of.low != of.high else ""
    return Cell(marked(judged.level, percent(of.median, 1)), spread, title=judged.level, style=colors(of.median))


def marked(level: Level, text: str) -> str:
    """Return an accuracy with the mark of its level: * for solved, brackets for guessing, ? if seeds differ."""
    return {Level.SOLVED: f"{text}*", Level.GUESSING: f"({text})", Level.MIXED: f"{text}?"}.get(level, text)


def colors(accuracy: float) -> str:
    """Return the colors of an accuracy as CSS."""
    color = heatmaps.PALETTES["sequential"](accuracy)
    luminance = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2]
    ink = "#000" if luminance >= BRIGHT else "#fff"
    return f"background: {to_hex(color)}; color: {ink}"


def build_report(results: ProbeResults) -> str:
    """Build the page. Equal results give identical pages."""
    found = tables(results)
    seeds = sorted({seed for (_, _, seed), _ in results.each()})
    return page.render(
        TEMPLATE,
        title="What can each position method do?",
        sentences=results.sentences(),
        settings=asdict(results.settings),
        seeds=seeds,
        solved=percent(SOLVED),
        errors=ERRORS,
        sheets={f"at-{table.length}": sheet(table, results.settings.length, ()) for table in found},
        tasks=Sheet.of(
            "The tasks",
            ["task", "question", "needs", "example"],
            [
                (name, TASKS[name].asks, TASKS[name].needs, Cell(*TASKS[name].example))
                for name in (found[0].guesses if found else ())
            ],
            kind="asked",
        ),
        gradient=heatmaps.gradients()["sequential"],
        machine=results.machine,
        facts_of={"Settings": asdict(results.settings), "Machine": results.machine},
        command=command_line(
            Probe(
                positions=",".join(found[0].rows if found else ()),
                tasks=",".join(results.runs),
                length=results.settings.length,
                steps=results.settings.steps,
                seeds=max(1, len(seeds)),
                seed=min(seeds, default=0),
            ),
            "probe",
        ),
    )
