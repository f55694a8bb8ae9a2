"""The command line in several processes, which torchrun or accelerate launch started: one of them speaks."""

from __future__ import annotations

from typing import Any

from .. import errors
from ..errors import InputError
from ..lab import ranks


def check_processes(command: Any) -> None:
    """Check that a command can run in several processes, if there are several.

    Raises:
        InputError: if it can't.
    """
    if ranks.size() > 1 and not getattr(command, "MANY", False):
        spread = "; `jobs` spreads its runs over processes" if hasattr(command, "jobs") else ""
        raise InputError(
            None, f"this command runs in one process, got {ranks.size()}; start it without a launcher{spread}"
        )


def fail(message: str, code: int = 2) -> int:
    """Print one line to stderr, if no other process of this run has failed before, and return the exit code."""
    return errors.fail(message, code) if ranks.is_first_to_fail() else code
