"""Exit codes: a command ends with a line and a code after bad input, Ctrl-C, a full disk or too little memory."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any

from .. import errors, ranks
from ..errors import InputError
from ..files import format_no_space, is_disk_full
from .flags import format_error

CLOSED = 141
"""The exit code if the reader of the output has closed it, as after SIGPIPE."""
NO_MEMORY = ("allocate memory", "out of memory", "can't start new thread", "failed to map segment")
"""Parts of the errors of libraries that got no memory. A thread needs some for its stack, a library for its code."""


@contextmanager
def exit_on_error(command: Any = None) -> Iterator[None]:
    """Turn errors of a command into a line and an exit code; without a command, errors of reading the command line.

    Any other error is a bug of this package. It is raised unchanged, so that Python shows where it is.

    Raises:
        SystemExit: with code 2 for bad input, 130 after Ctrl-C, and 141, without a message, if the reader of the output
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
        default = getattr(command, "INTERRUPTED", "finished work is saved; run the same command to continue")
        message = str(stop) or (default if command is not None else "")
        atexit.register(gc.freeze)  # Python's last collection would take a second
        raise SystemExit(_fail(f"interrupted{message and '; '}{message}", 130)) from None
    except BrokenPipeError:
        with suppress(OSError):  # or Python would report it again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED) from None
    except Exception as error:
        line = _format_error(error, command)
        if line is None:
            raise
        raise SystemExit(_fail(line)) from None


def _fail(message: str, code: int = 2) -> int:
    return errors.fail(message, code) if ranks.should_print_errors() else code


def _format_error(error: Exception, command: Any) -> str | None:
    """Return the message about an error; None if the error is a bug of this package."""
    if isinstance(error, InputError):
        return str(error) if command is None else format_error(error, command)
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):  # a recipe or a plugin
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    if is_disk_full(error):
        return format_no_space(getattr(error, "filename", None) or getattr(command, "out", None) or "the output")
    if isinstance(error, OSError):
        return str(error)
    if ranks.is_lost_process(error):
        return "another process of this run exited; run the same command to continue"
    if isinstance(error, MemoryError) or any(part in str(error) for part in NO_MEMORY):
        return f"not enough memory for these sizes ({str(error) or type(error).__name__})"
    return None
