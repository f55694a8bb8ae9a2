"""How a command ends: bad input, Ctrl-C, a closed output, a full disk and too little memory give a line and a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any

from .. import errors, ranks
from ..errors import InputError
from ..files import format_no_space, is_disk_full
from .flags import in_flags

CLOSED = 141
"""The exit code where the reader of the output has closed it: that of a program which SIGPIPE ends."""

NO_MEMORY = ("allocate memory", "out of memory", "can't start new thread", "failed to map segment")
"""Parts of the errors of libraries that got no memory. A thread needs some for its stack, a library for its code."""


@contextmanager
def ending(command: Any = None) -> Iterator[None]:
    """Turn what goes wrong in a command, or in reading the command line if there is none yet, into its exit.

    Any other error is a fault of ours. It is raised as it is, so that Python shows where.

    Raises:
        SystemExit: with code 2 for bad input, 130 after Ctrl-C, and 141, without a word, where the reader of the output
            has closed it.
    """
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # it was closed before the command began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open as long as the process
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # its encoding may lack characters
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        kept = getattr(command, "INTERRUPTED", "finished work is kept, and the same command continues")
        told = str(stop) or (kept if command is not None else "")
        raise SystemExit(_fail(f"interrupted{told and '; '}{told}", 130)) from None
    except BrokenPipeError:
        with suppress(OSError):  # or Python would complain of it again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED) from None
    except Exception as error:
        line = _line(error, command)
        if line is None:
            raise
        raise SystemExit(_fail(line)) from None


def _fail(message: str, code: int = 2) -> int:
    return errors.fail(message, code) if ranks.should_print_errors() else code


def _line(error: Exception, command: Any) -> str | None:
    """Return what to tell about an error that is no fault of ours; None for others."""
    if isinstance(error, InputError):
        return str(error) if command is None else in_flags(error, command)
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):  # a recipe or a plugin
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    if is_disk_full(error):
        return format_no_space(getattr(error, "filename", None) or getattr(command, "out", None) or "the output")
    if isinstance(error, OSError):
        return str(error)
    if ranks.is_lost_process(error):
        return "another process of this run ended; the same command continues"
    if isinstance(error, MemoryError) or any(part in str(error) for part in NO_MEMORY):
        return f"not enough memory for these sizes ({str(error) or type(error).__name__})"
    return None
