"""The tables of measured properties, with a number for each tick, as Markdown and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...analysis.properties import LENGTHS
from ...lab.report import page
from ...lab.sheet import Cell, Column, Sheet
from .results import PropertiesResults, Tick
from .ticks import MEANINGS, MethodTicks, disagreements, open_ticks, title

TEMPLATE = Path(__file__).with_suffix(".html.j2")
COLUMNS = {
    "inductive": Column("inductive", first="descending"),
    "data_driven": Column("data-driven", first="descending"),
    "parameter_efficient": Column("parameter", "efficient", "descending"),
    "translation_invariant": Column("translation", "invariant", "descending"),
    "parallelizable": Column("parallelizable", first="descending"),
    "interpretable": Column("interpretable", first="descending"),
}
ORDER = {"yes": 2, "open": 1, "no": 0}
"""The order of ticks when a table is sorted."""


def rows_of(results: PropertiesResults) -> list[MethodTicks]:
    """Return the rows of the table."""
    return [MethodTicks(position, ticks) for position, ticks in results.table.items()]


def sheets(results: PropertiesResults) -> list[Sheet]:
    """Return the table of ticks, and one of times."""
    return [ticks_sheet(rows_of(results)), times_sheet(results)]


def ticks_sheet(rows: Sequence[MethodTicks]) -> Sheet:
    """Return the table of ticks, each above its number, with a star where the paper says otherwise."""
    return Sheet.of(
        "Measured properties",
        [Column("position", wraps=True), *(COLUMNS[name] for name in MEANINGS)],
        [[Cell(row.position, order=row.position), *map(_cell, row.ticks.values())] for row in rows],
        notes=(
            *(f"{title(name)}: {meaning}" for name, meaning in MEANINGS.items()),
            *(["*: Table 1 of the TISA paper says otherwise"] if disagreements(rows) else []),
        ),
        sortable=True,
    )


def _cell(tick: Tick) -> Cell:
    return Cell(
        tick.word + ("*" if tick.differs else ""),
        tick.number,
        ORDER[tick.word],
        title=tick.note,
        style="" if tick.holds else "color: var(--muted)",
    )


def times_sheet(results: PropertiesResults) -> Sheet:
    """Return each method's time relative to attention without positions, at both lengths."""
    rows = []
    for position in results.table:
        steps = results.runs[position].steps
        ratios = [
            f"{seconds / plain:.1f}" if plain else "\N{EN DASH}"
            for seconds, plain in zip(steps.seconds, steps.plain_seconds, strict=True)
        ]
        rows.append([position, *ratios])
    return Sheet.of(
        "Time of one attention layer, relative to the same layer without positions",
        ["position", *(f"{length} tokens" for length in LENGTHS)],
        rows,
    )


def verdict(rows: Sequence[MethodTicks]) -> str:
    """Summarize the table in one sentence, its headline."""
    most = max((row.count for row in rows), default=0)
    best = page.listed([row.position for row in rows if row.count == most])
    total = len(MEANINGS)
    if most == total:
        return f"All {total} properties, measured: {best}"
    return f"Most of the {total} properties, measured: {best} with {most}"


def sentences(results: PropertiesResults) -> list[str]:
    """Return the headline, and all notes on the table."""
    rows = rows_of(results)
    return [verdict(rows), *(sentence for _, found in _notes(rows) for sentence in found)]


def _notes(rows: Sequence[MethodTicks]) -> list[tuple[str, list[str]]]:
    """Return the notes on the table, under headings."""
    parts = [
        ("Where Table 1 of the TISA paper says otherwise", disagreements(rows)),
        ("Undecided or impossible", open_ticks(rows)),
    ]
    return [(heading, found) for heading, found in parts if found]


def build_markdown(results: PropertiesResults) -> str:
    """Build the tables as Markdown, with the meaning of their numbers and where they differ from the paper."""
    rows = rows_of(results)
    ticks, times = sheets(results)
    lines = [f"# {verdict(rows)}", "", *ticks.markdown(), "", *(f"- {note}" for note in ticks.notes)]
    for heading, found in _notes(rows):
        lines += ["", f"## {heading}", "", *(f"- {sentence}" for sentence in found)]
    lines += ["", f"## {times.title}", "", *times.markdown()]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(results.settings).items())
    machine = results.machine
    return "\n".join(
        [*lines, "", f"Settings: {settings}.", f"Run on {machine.get('cpu')}, torch {machine.get('torch')}.", ""]
    )


def build_report(results: PropertiesResults) -> str:
    """Build the page. Equal results give identical pages."""
    rows = rows_of(results)
    ticks, times = sheets(results)
    return page.render(
        TEMPLATE,
        title="Which properties does each position method have?",
        sentences=[verdict(rows)],
        ticks=ticks,
        notes=_notes(rows),
        times=times,
        facts_of={"Settings": asdict(results.settings), "Text": results.text, "Machine": results.machine},
        command="",
    )
