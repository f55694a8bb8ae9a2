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
from .judgment import ERRORS, SOLVED, Judged, Level, Table, tables
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
    found, trained = tables(results), results.settings.length
    notes = [*(f"{task} needs: {TASKS[task].needs}" for task in results.runs), READING]
    return [sheet(table, trained, notes if table is found[-1] else ()) for table in found]


def sheet(table: Table, trained: int, notes: Sequence[str] = ()) -> Sheet:
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
    of, level = judged.accuracy, judged.level
    if of.median is None or of.low is None or of.high is None:
        return Cell(level, title=of.why_not)
    text = percent(of.median, 1)
    marks = {Level.SOLVED: f"{text}*", Level.GUESSING: f"({text})", Level.MIXED: f"{text}?"}
    spread = f"{percent(of.low)}\N{EN DASH}{percent(of.high)}" if of.low != of.high else ""
    return Cell(marks.get(level, text), spread, title=level, style=colors(of.median))


def colors(accuracy: float) -> str:
    """Return the colors of an accuracy as CSS."""
    color = heatmaps.PALETTES["sequential"](accuracy)
    luminance = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2]
    return f"background: {to_hex(color)}; color: {'#000' if luminance >= BRIGHT else '#fff'}"


def build_report(results: ProbeResults) -> str:
    """Build the page. Equal results give identical pages."""
    found, settings = tables(results), results.settings
    seeds = sorted({seed for (_, _, seed), _ in results.each()})
    positions = dict.fromkeys(name for (_, name, _), _ in results.each())
    tasks = [(name, TASKS[name].asks, TASKS[name].needs, Cell(*TASKS[name].example)) for name in results.runs]
    options = Probe(
        positions=",".join(positions),
        tasks=",".join(results.runs),
        length=settings.length,
        steps=settings.steps,
        seeds=max(1, len(seeds)),
        seed=min(seeds, default=0),
    )
    return page.render(
        TEMPLATE,
        title="What can each position method do?",
        sentences=results.sentences(),
        settings=settings,
        seeds=seeds,
        solved=percent(SOLVED),
        errors=ERRORS,
        sheets={f"at-{table.length}": sheet(table, settings.length) for table in found},
        tasks=Sheet.of("The tasks", ["task", "question", "needs", "example"], tasks, kind="asked"),
        gradient=heatmaps.gradients()["sequential"],
        machine=results.machine,
        facts_of={"Settings": asdict(settings), "Machine": results.machine},
        command=command_line(options, "probe"),
    )
