"""Terminal output that all studies share: a progress bar, and lines that can be copied."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..errors import printable
from .progress import Progress as Listener

if TYPE_CHECKING:
    from .sheet import Sheet


class Terminal(Console):
    """A console that prints text as it stands: without markup, and with control characters escaped.

    Names in checkpoints, tables and folders are untrusted. Every string that is printed, in a table too,
    passes through :meth:`render_str`.

    Args:
        options: those of rich's Console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into rich's text; its line ends are kept, since the lines around names are ours."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Leave the answer to the command line, which knows what was running."""
        raise BrokenPipeError


def output(*, quiet: bool = False) -> Terminal:
    """Return the console of a command: as wide as the terminal, and 100 columns in a file or a pipe."""
    return Terminal(width=None if sys.stdout.isatty() else 100, quiet=quiet)


class Bar(Listener):
    """A progress bar for the whole job, above which each finished part leaves a line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            # Without markup, because labels may hold brackets.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
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
        self.bar.update(self.task, total=steps, completed=0)

    def begin(self, label: str) -> None:
        self.bar.update(self.task, description=printable(label), detail="")

    def step(self, steps: int = 1, detail: str = "") -> None:
        self.bar.update(self.task, advance=steps, detail=printable(detail))

    def line(self, text: str | Sheet) -> None:
        # Text is not wrapped, so that paths can be copied.
        self.console.print(text, highlight=False, soft_wrap=isinstance(text, str))


def say(console: Console, *lines: str) -> None:
    """Print lines without wrapping them, so that paths and code can be copied from the terminal."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
