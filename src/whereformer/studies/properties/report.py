"""The reports of ``whereformer properties``: a table of what each method can do, with a number for each tick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...analysis.properties import LENGTHS
from ...lab.report import page
from .results import PropertiesResults
from .ticks import MEANINGS, MethodTicks, disagreements, open_ticks, title

TEMPLATE = Path(__file__).with_suffix(".html.j2")
MARKS = {"yes": "\N{CHECK MARK}", "no": "\N{BALLOT X}", "open": "?"}

STAR = "\\*"
"""A star, escaped for Markdown."""

TIME = "Time of one attention layer, relative to the same layer without positions"


def build_markdown(results: PropertiesResults, rows: Sequence[MethodTicks]) -> str:
    """Build the table as Markdown, with the meaning of its numbers and where it differs from the paper."""
    lines = [f"# {verdict(rows)}", "", *markdown_table(rows), ""]
    lines += [f"- {title(name)}: {meaning}" for name, meaning in MEANINGS.items()]
    for heading, sentences in _notes(rows):
        lines += ["", f"## {heading}", "", *(f"- {sentence}" for sentence in sentences)]
    lines += ["", f"## {TIME}", "", f"| | {' | '.join(f'{length} tokens' for length in LENGTHS)} |", "|---|---|---|"]
    lines += [f"| {position} | {' | '.join(cells)} |" for position, cells in times(results, rows)]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(results.settings).items())
    machine = results.machine
    return "\n".join(
        [*lines, "", f"Settings: {settings}.", f"Run on {machine.get('cpu')}, torch {machine.get('torch')}.", ""]
    )


def markdown_table(rows: Sequence[MethodTicks]) -> list[str]:
    """Return the table's lines. Each cell has a tick and its number, with a star where the paper says otherwise."""
    names = [title(name) for name in MEANINGS]
    lines = [f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for row in rows:
        cells = (f"{MARKS[tick.word]}{STAR if tick.differs else ''} {tick.number}" for tick in row.ticks.values())
        lines.append(f"| {row.position} | {' | '.join(cells)} |")
    return lines


def verdict(rows: Sequence[MethodTicks]) -> str:
    """Summarize the page in one sentence, its headline."""
    most = max(row.count for row in rows)
    best = page.listed([row.position for row in rows if row.count == most])
    total = len(MEANINGS)
    if most == total:
        return f"All {total} properties, measured: {best}"
    return f"Most of the {total} properties, measured: {best} with {most}"


def _notes(rows: Sequence[MethodTicks]) -> list[tuple[str, list[str]]]:
    """Return the notes on the table, under headings."""
    parts = [
        ("Where Table 1 of the TISA paper says otherwise", disagreements(rows)),
        ("Undecided or impossible", open_ticks(rows)),
    ]
    return [(heading, sentences) for heading, sentences in parts if sentences]


def build_report(results: PropertiesResults, rows: Sequence[MethodTicks]) -> str:
    """Build the page. Equal results give identical pages."""
    return page.render(
        TEMPLATE,
        title="What can each position method do?",
        verdict=verdict(rows),
        columns=[title(name) for name in MEANINGS],
        rows=rows,
        marks=MARKS,
        meanings={title(name): meaning for name, meaning in MEANINGS.items()},
        notes=_notes(rows),
        lengths=LENGTHS,
        time=TIME,
        times=times(results, rows),
        settings=asdict(results.settings),
        text=results.text,
        machine=results.machine,
    )


def times(results: PropertiesResults, rows: Sequence[MethodTicks]) -> list[tuple[str, list[str]]]:
    """Return each method's time relative to attention without positions, at both lengths."""
    found = []
    for row in rows:
        steps = results.runs[row.position].steps
        cells = [
            f"{seconds / plain:.1f}" if plain else "\N{EN DASH}"
            for seconds, plain in zip(steps.seconds, steps.plain_seconds, strict=True)
        ]
        found.append((row.position, cells))
    return found
