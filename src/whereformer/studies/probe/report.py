"""The HTML report of ``whereformer probe``: a heat map of methods and tasks at each length."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.colors import to_hex

from ...files import write_atomically
from ...lab.report import heatmaps, page
from ...lab.report.numbers import percent
from .judgment import ERRORS, SOLVED, Cell, Level, Table, about_seeds, verdict
from .results import ProbeResults
from .tasks import TASKS

TEMPLATE = Path(__file__).with_suffix(".html.j2")
BRIGHT = 0.5
"""On colors of at least this luminance, text is black."""


@dataclass(frozen=True)
class Square:
    """A cell of a heat map: its text, a smaller line below, what a pointer shows, and CSS for its colors."""

    text: str
    detail: str
    title: str
    style: str


def write_report(results: ProbeResults, found: Sequence[Table], path: Path) -> None:
    """Write the report to ``path``. An old page stays until the new one is complete."""
    write_atomically(path, build_report(results, found))


def build_report(results: ProbeResults, found: Sequence[Table]) -> str:
    """Build the page. Equal results give identical pages."""
    headline, *others = verdict(found, page.listed)
    seeds = sorted({seed for _, _, seed, _ in results.each()})
    trained = results.settings.length
    return page.render(
        TEMPLATE,
        title="What can each position method do?",
        verdict=headline,
        sentences=[*others, about_seeds(results)],
        settings=asdict(results.settings),
        machine=results.machine,
        seeds=seeds,
        solved=percent(SOLVED),
        errors=ERRORS,
        maps=[
            (
                table,
                [painted(guess) for guess in table.guesses.values()],
                {name: [square(cell) for cell in row.values()] for name, row in table.rows.items()},
                "as trained" if table.length == trained else f"{table.length // trained} times the trained length",
            )
            for table in found
        ],
        tasks={name: (TASKS[name], guess) for name, guess in (found[0].guesses if found else {}).items()},
        gradient=heatmaps.gradients()["sequential"],
        command=command(results, found, seeds),
    )


def square(cell: Cell) -> Square:
    """Draw a cell."""
    of = cell.accuracy
    if of.median is None or of.low is None or of.high is None:
        return Square(cell.level, "", of.why_not, "")
    spread = f"{percent(of.low)}\N{EN DASH}{percent(of.high)}" if of.low != of.high else ""
    return Square(marked(cell.level, percent(of.median, 1)), spread, cell.level, painted(of.median).style)


def marked(level: Level, text: str) -> str:
    """Return an accuracy with the mark of its level: * for solved, brackets for guessing, ? if seeds differ."""
    return {Level.SOLVED: f"{text}*", Level.GUESSING: f"({text})", Level.MIXED: f"{text}?"}.get(level, text)


def painted(accuracy: float) -> Square:
    """Return an accuracy as a cell with its color."""
    color = heatmaps.PALETTES["sequential"](accuracy)
    luminance = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2]
    ink = "#000" if luminance >= BRIGHT else "#fff"
    return Square(percent(accuracy, 1), "", "", f"background: {to_hex(color)}; color: {ink}")


def command(results: ProbeResults, found: Sequence[Table], seeds: Sequence[int]) -> str:
    """Return the command that reproduces these results."""
    options = {
        "positions": ",".join(found[0].rows if found else ()),
        "tasks": ",".join(results.runs),
        "length": results.settings.length,
        "steps": results.settings.steps,
        "seeds": len(seeds),
        "seed": min(seeds, default=0),
    }
    return " ".join(["whereformer probe", *(f"--{name} {shlex.quote(str(value))}" for name, value in options.items())])
