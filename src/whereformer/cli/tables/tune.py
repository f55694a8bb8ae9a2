"""Print the thresholds that ``whereformer bench --tune`` measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ...experiments.bench.tune import TuneRow, lines, show
from ...kernels import tuning
from ..terminal import say


def print_tuning(console: Console, rows: Sequence[TuneRow]) -> None:
    """Print the measured thresholds, at most 80 columns wide, and the lines that would change in ``tuning.py``."""
    processor = tuning.current().processor
    table = Table(title=f"Thresholds of attention for {processor}, measured here", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for title in ("now", "best\nhere", "time by\nbest / now"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        same = row.best == row.now
        ratio = "-" if same else f"{row.ratio:.2f} ({row.lowest:.2f}-{row.highest:.2f})"
        verdict = "keep" if same else "change" if row.better else "noise"
        table.add_row(row.label, show(row.now), show(row.best), ratio, verdict)
    console.print(table)
    console.print(
        "Medians of the rounds' ratios (lowest-highest). noise: less than 3% faster, or not in every round; keep.",
        style="dim",
        highlight=False,
    )
    for failure in dict.fromkeys(failure for row in rows for failure in row.failed):
        console.print(f"failed: {failure}", style="dim", highlight=False)
    changed = lines(rows)
    if changed:
        say(console, f"for {processor} in src/whereformer/kernels/tuning.py:", *(f"    {line}" for line in changed))
    else:
        say(console, "nothing to change in src/whereformer/kernels/tuning.py")
