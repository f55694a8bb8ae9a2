"""The error that a person is meant to read."""

from __future__ import annotations

import sys


class InputError(ValueError):
    """Input that does not fit, in one line: which argument, what came, what fits. Commands print it and exit with 2."""


def fail(message: str, code: int = 2) -> int:
    """Print one line to stderr and give the exit code back: 2 for bad input."""
    print(f"whereformer: {' '.join(message.split())}", file=sys.stderr)
    return code
