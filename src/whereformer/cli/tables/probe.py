"""Print the tables of ``whereformer probe``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Printed

from ...studies.probe.judgment import SOLVED, Cell, Level, Table
from ...studies.probe.report import marked
from ...studies.probe.tasks import TASKS


def print_probes(console: Console, found: Sequence[Table]) -> None:
    """Print a table of methods and tasks for each length, at most 100 columns wide."""
    for table in found:
        times = table.length // found[0].length
        how = "as trained" if times == 1 else f"{times} times as many as trained"
        console.print(f"Accuracy in percent at {table.length} symbols, {how}", style="bold", highlight=False)
        printed = Printed(box=box.SIMPLE_HEAD, pad_edge=False)
        printed.add_column("position", no_wrap=True)
        for task in table.guesses:
            printed.add_column(task, justify="right", no_wrap=True)
        printed.add_column("solved", justify="right", no_wrap=True)
        guesses = (f"{100 * guess:.1f}" for guess in table.guesses.values())
        printed.add_row("guessing", *guesses, "", style="dim")
        for name, row in table.rows.items():
            printed.add_row(name, *map(_text, row.values()), f"{len(table.solved(name))}/{len(row)}")
        console.print(printed)
    for task in found[0].guesses if found else ():
        console.print(f"{task} needs: {TASKS[task].needs}", style="dim", highlight=False)
    console.print(
        f"* solved: at least {SOLVED:.0%}. ( ): no better than guessing without positions. "
        "?: better than guessing with some seeds only. guessing: the best guess without positions.",
        style="dim",
        highlight=False,
    )


def _text(cell: Cell) -> str:
    of = cell.accuracy
    if of.median is None or of.low is None or of.high is None:
        return "-" if cell.level is Level.MISSING else cell.level
    text = marked(cell.level, f"{100 * of.median:.1f}")
    return text if of.low == of.high else f"{text}\n{100 * of.low:.0f}-{100 * of.high:.0f}"
