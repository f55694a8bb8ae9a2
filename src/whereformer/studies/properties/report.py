"""The tables of measured properties, with a number for each tick, as Markdown and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...analysis.properties import LENGTHS
from ...lab.report import page
from ...lab.sheet import Cell, Column, Sheet
from .ticks import MEANINGS, TITLES, Table, Tick, notes

if TYPE_CHECKING:
    from .results import PropertiesResults

TEMPLATE = Path(__file__).with_suffix(".html.j2")
ORDER = {"yes": 2, "open": 1, "no": 0}
"""The order of ticks when a table is sorted."""


def sheets(results: PropertiesResults) -> Sequence[Sheet]:
    """Return the table of ticks, each above its number, and one of times relative to attention without positions."""
    table = results.table
    titles = (title.partition(" ") for title in TITLES.values())
    columns = [Column(name, detail, first="descending") for name, _, detail in titles]
    starred = any(tick.differs for ticks in table.values() for tick in ticks.values())
    times = []
    for position in table:
        steps = results.runs[position].steps
        pairs = zip(steps.seconds, steps.plain_seconds, strict=True)
        times.append([position, *(f"{time / plain:.1f}" if plain else "\N{EN DASH}" for time, plain in pairs)])
    return [
        Sheet.of(
            "Measured properties",
            [Column("position", wraps=True), *columns],
            [[Cell(position, order=position), *map(_cell, ticks.values())] for position, ticks in table.items()],
            notes=(
                *(f"{TITLES[name]}: {meaning}" for name, meaning in MEANINGS.items()),
                *(["*: Table 1 of the TISA paper says otherwise"] if starred else []),
            ),
            sortable=True,
        ),
        Sheet.of(
            "Time of one attention layer, relative to the same layer without positions",
            ["position", *(f"{length} tokens" for length in LENGTHS)],
            times,
        ),
    ]


def _cell(tick: Tick) -> Cell:
    return Cell(
        tick.word + ("*" if tick.differs else ""),
        tick.number,
        ORDER[tick.word],
        title=tick.note,
        style="" if tick.holds else "color: var(--muted)",
    )


def verdict(table: Table) -> str:
    """Summarize the table in one sentence, its headline."""
    counts = {position: sum(tick.holds is True for tick in ticks.values()) for position, ticks in table.items()}
    total, most = len(MEANINGS), max(counts.values(), default=0)
    best = page.listed([position for position, count in counts.items() if count == most])
    if most == total:
        return f"All {total} properties, measured: {best}"
    return f"Most of the {total} properties, measured: {best} with {most}"


def sentences(results: PropertiesResults) -> Sequence[str]:
    """Return the headline, and all notes on the table."""
    return [verdict(results.table), *(sentence for found in notes(results.table).values() for sentence in found)]


def build_markdown(results: PropertiesResults) -> str:
    """Build the tables as Markdown, with the meaning of their numbers and where they differ from the paper."""
    ticks, times = sheets(results)
    lines = [f"# {verdict(results.table)}", "", *ticks.markdown(), "", *(f"- {note}" for note in ticks.notes)]
    for heading, found in notes(results.table).items():
        lines += ["", f"## {heading}", "", *(f"- {sentence}" for sentence in found)]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(results.settings).items())
    machine = f"Run on {results.machine.get('cpu')}, torch {results.machine.get('torch')}."
    lines += ["", f"## {times.title}", "", *times.markdown(), "", f"Settings: {settings}.", machine, ""]
    return "\n".join(lines)


def build_report(results: PropertiesResults) -> str:
    """Build the page. Equal results give identical pages."""
    ticks, times = sheets(results)
    return page.render(
        TEMPLATE,
        title="Which properties does each position method have?",
        sentences=[verdict(results.table)],
        ticks=ticks,
        notes=notes(results.table),
        times=times,
        facts_of={"Settings": asdict(results.settings), "Text": results.text, "Machine": results.machine},
        command="",
    )
