"""Print the table of ``whereformer properties``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ...studies.properties import ticks


def print_properties(console: Console, rows: Sequence[ticks.MethodTicks]) -> None:
    """Print what each method can do, at most 100 columns wide, and where that differs from the paper."""
    table = Table(title="What each position method can do, measured", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("position", no_wrap=True)
    for heading in ("inductive", "data-\ndriven", "parameter\nefficient", "translation\ninvariant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("paralleliz-\nable", "interpret-\nable"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        marks = (f"{tick.word}{'*' if tick.differs else ''}\n{tick.number}" for tick in row.ticks.values())
        table.add_row(row.position, *marks)
    console.print(table)
    for name, meaning in ticks.MEANINGS.items():
        console.print(f"{ticks.title(name)}: {meaning}", style="dim", highlight=False)
    for heading, lines in (
        ("Undecided or impossible:", ticks.open_ticks(rows)),
        ("* Where Table 1 of the TISA paper says otherwise:", ticks.disagreements(rows)),
    ):
        if lines:
            console.print(f"\n{heading}", style="bold", highlight=False)
        for line in lines:
            console.print(f"- {line}", highlight=False)
