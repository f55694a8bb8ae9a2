"""Print the table of ``whereformer bench``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ...studies.bench.ways import FLOOR

if TYPE_CHECKING:
    from ...studies.bench.results import BenchRow


def print_bench(console: Console, rows: Sequence[BenchRow]) -> None:
    """Print a line for each case and way, with the reasons for missing numbers below the table."""
    dtypes = {row.dtype for row in rows}
    table = Table(title="Time relative to torch's attention without positions", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("terms", no_wrap=True)
    if len(dtypes) > 1:
        table.add_column("dtype", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for title in ("forward", "training"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("training\nMiB", justify="right", no_wrap=True)
    found: dict[tuple[str, str, int, str], dict[str, BenchRow]] = {}
    for row in rows:
        found.setdefault((row.dtype, row.terms, row.n, row.way), {})[row.direction] = row
    notes: dict[str, int] = {}
    previous = None
    for (dtype, kind, n, way), both in found.items():
        if previous not in (None, (dtype, kind)):
            table.add_section()
        previous = dtype, kind
        cells = [_time(both.get(direction), notes) for direction in ("forward", "training")]
        training = both.get("training")
        memory = "-" if training is None or training.memory is None else _mebibytes(training.memory)
        table.add_row(kind, *([dtype] if len(dtypes) > 1 else []), str(n), way, *cells, memory)
    console.print(table)
    for note, number in notes.items():
        console.print(f"[{number}] {note}", style="dim", highlight=False)
    console.print(
        "Medians of the rounds' ratios (lowest-highest). sdpa is torch's attention without positions. MiB is what a "
        "call needs beyond its inputs.",
        style="dim",
        highlight=False,
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 10 * 2**20 else f"{size / 2**20:,.0f}"


def _time(row: BenchRow | None, notes: dict[str, int]) -> str:
    """Format a cell: the time of plain attention, the ratio of another way, or the number of a note."""
    if row is None:
        return "-"
    if row.milliseconds is None:
        return f"cannot [{notes.setdefault(row.note, len(notes) + 1)}]"
    if row.way == FLOOR.name:
        return f"{row.milliseconds:.3g} ms" if row.milliseconds < 1000 else f"{row.milliseconds:.0f} ms"
    return f"{row.ratio:.2f} ({row.lowest:.2f}-{row.highest:.2f})"
