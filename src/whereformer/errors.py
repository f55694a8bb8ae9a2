"""InputError, the error for bad input that users read, and how the command line prints it."""

from __future__ import annotations

import sys


class InputError(ValueError):
    """An invalid argument, described in one line: ``field: reason``.

    Args:
        field: the argument's name in Python, such as ``decoder_layers``; None if the error concerns no single argument.
        reason: what was expected and what was given. Names of other arguments are in backquotes: `` `length` ``.

    The command line prints the error with its own names (``--decoder-layers``, ``--length``) and exits with code 2.
    """

    def __init__(self, field: str | None, reason: str) -> None:
        # Exception needs both, or copying and pickling the error would lose them.
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return self.reason if self.field is None else f"{self.field}: {self.reason}"


def fail(message: str, code: int = 2) -> int:
    """Print one line to stderr and return the exit code: 2 for bad input."""
    print(f"whereformer: {' '.join(message.split())}", file=sys.stderr)
    return code
