"""The report of ``whereformer finetune``: what position adds to a pretrained model, and what its heads learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ... import __version__
from ...report import figures, heads, page
from ...report.numbers import DASH, MINUS, decimals
from ..compare.summary import Cell
from .summary import Row, Table, tables


def build_markdown(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [f"# {results['model']}, fine-tuned", ""]
    for table in tables(results):
        header = ["task", "metric", *table.columns, "gain", "error reduction"]
        lines += [f"## {table.position}", "", _line(header), _line(["---"] * 2 + ["---:"] * (len(header) - 2))]
        for row in table.rows:
            cells = [_median(cell) + (f" ({_range(cell)})" if _range(cell) else "") for cell in row.cells]
            lines.append(_line([row.task, row.metric, *cells, _gain(row), _signed(row.error_reduction, "%")]))
        lines.append("")
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in results["settings"].items())
    lines += [explanation(results), "", *_notes(results), "", f"Settings: {settings}.", ""]
    machine = results["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    return "\n".join([*lines, f"Run on {machine['cpu']}, {machine['threads']} threads; {versions}.", ""])


def explanation(results: dict[str, Any]) -> str:
    """What the numbers of a table are."""
    seeds = results["shown"]["seeds"]
    what = "Scores in percent" + (f", medians over {len(seeds)} seeds with their range" if len(seeds) > 1 else "")
    return (
        f"{what}. Gain is the largest over the baseline, in points; error reduction is that gain by the baseline's "
        "distance from 100. *: every seed of it is better than every seed of the baseline; other gains may be luck."
    )


def _notes(results: dict[str, Any]) -> list[str]:
    """What must be known to read the scores."""
    notes = []
    for name, facts in results["tasks"].items():
        if facts["subsets"]:
            rows = ", ".join(f"{split} {facts['rows'][split]:,} rows" for split in facts["subsets"])
            notes.append(
                f"- {name}: only a part of the official data ({rows}); not to be compared with published scores"
            )
        if facts["cut_rows"]:
            notes.append(f"- {name}: {facts['cut_rows']:,} rows were cut to {results['settings']['max_length']} tokens")
    return notes


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _median(cell: Cell | None) -> str:
    return DASH if cell is None or cell.median is None else f"{cell.median:.1f}"


def _range(cell: Cell | None) -> str:
    if cell is None or cell.low is None or cell.high is None or cell.low == cell.high:
        return ""
    return f"{decimals(cell.low, 1)}{DASH}{decimals(cell.high, 1)}"


def _order(number: float | None) -> float | str:
    """What a table is sorted by; what has no number stays last."""
    return "" if number is None else number


def _signed(number: float | None, unit: str = "") -> str:
    return DASH if number is None else f"{number:+z.1f}{unit}".replace("-", MINUS)


def _gain(row: Row) -> str:
    return _signed(row.gain) + ("*" if row.clear else "")


@dataclass(frozen=True)
class Shown:
    """A row of a table: its name, each cell's median (as text and to sort by) and range, and which is the best."""

    row: Row
    cells: list[tuple[str, float | str, str, bool]]
    gain: str
    error_reduction: str


def shown(row: Row) -> Shown:
    """What the page says of a row."""
    medians = [cell.median for cell in row.cells if cell is not None and cell.median is not None]
    best = max(medians) if len(medians) > 1 else None

    def is_best(cell: Cell | None) -> bool:
        return cell is not None and best is not None and cell.median == best

    cells = [(_median(cell), _order(cell.median if cell else None), _range(cell), is_best(cell)) for cell in row.cells]
    return Shown(row, cells, _gain(row), _signed(row.error_reduction, "%"))


def columns(table: Table) -> list[page.Column]:
    """What a table's columns are called, and how they are sorted."""
    scores = [*table.columns, "gain", "error reduction"]
    return [page.Column("task"), page.Column("metric"), *(page.Column(name, first="descending") for name in scores)]


def verdict(found: Sequence[Table]) -> str:
    """The page in one sentence."""
    gains = [
        (row.gain, table.position, f"{row.task} ({row.metric})", row.clear)
        for table in found
        for row in table.rows
        if row.gain is not None
    ]
    if not gains:
        return "Fine-tuned, and nothing to compare it with"
    gain, position, task, _ = max(gains)
    if gain <= 0:
        return "No position method gained over its baseline"
    better, clear = sum(each[0] > 0 for each in gains), sum(each[3] for each in gains)
    return (
        f"{position} gains most on {task}: {gain:.1f} points; {better} of {len(gains)} rows have a gain, {clear} of "
        "them with every seed"
    )


@dataclass(frozen=True)
class Heads:
    """A drawing of what the heads of one run add."""

    title: str
    drawing: Markup
    wide: bool


def drawings(results: dict[str, Any]) -> list[Heads]:
    """The curves of the last run of every task and position method."""
    positions = results["shown"]["positions"]
    looks = dict(zip(positions, figures.series(len(positions)), strict=True))
    found: list[Heads] = []
    for task, by_position in results["curves"].items():
        for position, kept in by_position.items():
            if position not in looks:
                continue
            title = f"{task}, {kept['variant']}, seed {kept['seed']}"
            label = f"What {kept['variant']} adds to scores after {task}, per head and offset"
            name = f"curves-{len(found)}"
            drawing = heads.offset_curves(kept["heads"], looks[position], name, label)
            found.append(Heads(title, drawing, len(kept["heads"][0]) > 6))
    return found


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    """What is known about a task's rows, as a person would write it."""
    found = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:,}" for key, number in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, filter(None, value)))
        found[name] = DASH if value in (None, "") else value
    return found


def build_report(results: dict[str, Any]) -> str:
    """The page; equal results give equal pages."""
    found = tables(results)
    return page.render(
        TEMPLATE,
        title="What does position add to a pretrained model?",
        version=__version__,
        verdict=verdict(found),
        model=results["model"],
        tables=[(table, columns(table), [shown(row) for row in table.rows]) for table in found],
        explanation=explanation(results),
        notes=[note.removeprefix("- ") for note in _notes(results)],
        heads=drawings(results),
        settings=results["settings"],
        seeds=results["shown"]["seeds"],
        tasks={name: _facts(facts) for name, facts in results["tasks"].items()},
        machine={**results["machine"], **results["versions"]},
    )
