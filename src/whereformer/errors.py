"""InputError, the error for bad input that users read, and how untrusted text is printed."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches


class InputError(ValueError):
    """An invalid argument, described in one line: ``field: reason``.

    Args:
        field: the argument's name in Python, such as ``decoder_layers``; None if the error concerns no single argument.
        reason: the expected value and the value that came. Names of other arguments are in backquotes: `` `length` ``.

    The command line prints the error with its own names (``--decoder-layers``, ``--length``) and exits with code 2.
    """

    def __init__(self, field: str | None, reason: str) -> None:
        # Exception needs both, or copying and pickling the error would lose them.
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return self.reason if self.field is None else f"{self.field}: {self.reason}"


MAX_NAME = 300
"""The largest number of characters of a path that an error quotes."""
MAX_LINE = 1000
"""The largest number of characters of an error. Longer ones are cut in the middle, because advice is at the end."""
MAX_LISTED = 10
"""The largest number of names that an error lists."""


def printable(text: str) -> str:
    """Return text in one line that cannot control a terminal.

    Names in checkpoints, configurations, tables and folders are untrusted. Control characters, escape
    sequences, marks that reverse the direction of writing, and halves of surrogate pairs become escapes as in Python
    (``\\x1b``, ``\\n``, ``\\u202e``).
    """
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
            for char in text
        )
    return text


def short_repr(value: object, width: int = 60) -> str:
    """Return ``repr(value)`` for an error, cut to ``width`` characters: untrusted values may be of any size."""
    try:
        text = repr(value).replace("\n", " ")  # arrays have lines
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists within lists
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= width else f"{text[:width]}..."


def list_some(names: Iterable[object], width: int = 60) -> str:
    """Return names in a row, for an error: the first MAX_LISTED, each cut, and the number of the others."""
    all_names = [*map(str, names)] or ["none"]
    cut = [name if len(name) <= width else f"{name[:width]}..." for name in all_names[:MAX_LISTED]]
    rest = [f"... ({len(all_names) - MAX_LISTED} more)"] if len(all_names) > MAX_LISTED else []
    return ", ".join([*cut, *rest])


def suggest(word: str, known: Iterable[str]) -> str:
    """Return an error's question "did you mean ...?", with the known name closest to a word; "" if none is close."""
    close = get_close_matches(word.lower(), known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def join_words(words: Iterable[object], conjunction: str = "and") -> str:
    """Join words as in a sentence: a, b and c."""
    *first, last = map(str, words)
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def one_line(message: str) -> str:
    """Return an error's message as one printable line: every run of white space becomes a space."""
    line = printable(" ".join(message.split()))
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 300]}...{line[-300:]}"


def fail(message: str, code: int = 2) -> int:
    """Print one line to stderr and return the exit code: 2 for bad input."""
    with suppress(OSError):  # the output is closed, so no one reads it
        print(f"whereformer: {one_line(message)}", file=sys.stderr, flush=True)
    return code
