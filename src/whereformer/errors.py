"""The error that a person is meant to read."""

from __future__ import annotations

import sys


class InputError(ValueError):
    """An argument that does not fit, in one line: ``field: reason``.

    Args:
        field: the argument's name in Python, such as ``decoder_layers``; None if the error is about no single argument.
        reason: what was expected and what came. Names of other arguments stand between backquotes: `` `length` ``.

    The command line prints such an error with its own names (``--decoder-layers``, ``--length``) and exits with 2.
    """

    def __init__(self, field: str | None, reason: str) -> None:
        # Both are handed on, so that a copy or a pickle of the error is whole.
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return self.reason if self.field is None else f"{self.field}: {self.reason}"


def fail(message: str, code: int = 2) -> int:
    """Print one line to stderr and return the exit code: 2 for bad input."""
    print(f"whereformer: {' '.join(message.split())}", file=sys.stderr)
    return code
