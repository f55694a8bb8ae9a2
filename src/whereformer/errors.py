"""The error that a person is meant to read."""

from __future__ import annotations


class InputError(ValueError):
    """Input that does not fit, in one line: which argument, what came, what fits. Commands print it and exit with 2."""
