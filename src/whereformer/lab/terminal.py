"""Terminal output that all studies share: text is escaped, and lines can be copied."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from ..errors import printable


class Terminal(Console):
    """A console that prints text as it stands: without markup, and with control characters escaped.

    Names in checkpoints, tables and folders are untrusted. Every string that is printed, in a table too,
    passes through :meth:`render_str`.
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
    """Return the console of a command: as wide as the terminal or COLUMNS says; in a file or a pipe, 100 columns."""
    return Terminal(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100, quiet=quiet)
