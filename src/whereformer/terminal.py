"""What commands show in a terminal: progress with the time left, and the ranked table."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .tasks.compare import Progress as Listener
from .tasks.ranking import Cell, Row


class Bar(Listener):
    """A progress bar over the whole job; finished parts leave a line each."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            speed_estimate_period=120,
            refresh_per_second=2,
            transient=True,
        )
        self.task = self.bar.add_task("", total=None, detail="")

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, steps: int) -> None:
        self.bar.update(self.task, total=steps)

    def begin(self, label: str) -> None:
        self.bar.update(self.task, description=label, detail="")

    def step(self, steps: int = 1, detail: str = "") -> None:
        self.bar.update(self.task, advance=steps, detail=detail)

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False)


def print_ranking(console: Console, rows: Sequence[Row], length: int) -> None:
    """The table of a comparison, at most 100 columns wide."""
    table = Table(
        title=f"Held-out masked-LM loss, trained on {length} tokens at a time (lower is better)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("position", no_wrap=True)
    lengths = sorted(rows[0].loss)
    for tried in lengths:
        table.add_column(f"loss\n@{tried}", justify="right", no_wrap=True)
    for title in ("accu-\nracy", "speed", "MiB", "params"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.rank),
            row.position,
            *(_loss(row.loss[tried]) for tried in lengths),
            f"{row.accuracy.median:.1%}",
            "-" if row.relative_speed.median is None else f"{row.relative_speed.median:.2f}",
            "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.0f}",
            f"{row.positional_parameters:,}",
        )
    console.print(table)
    console.print(
        "Methods with the same # can't be told apart. speed: of training, relative to none; MiB: peak memory of a "
        "training step; params: those of position.",
        style="dim",
        highlight=False,
    )


def _loss(cell: Cell) -> str:
    if cell.median is None or cell.low is None or cell.high is None:
        return "cannot"
    if cell.low == cell.high:
        return f"{cell.median:.3f}"
    return f"{cell.median:.3f}\n{cell.low:.2f}-{cell.high:.2f}"
