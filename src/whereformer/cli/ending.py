"""How a command ends: bad input, Ctrl-C, a closed output and our own faults each give one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from .. import __version__, errors
from ..errors import InputError
from ..files import full_disk, no_room
from ..lab import ranks
from .flags import in_flags

CLOSED = 141
"""The exit code where the reader of the output has closed it: that of a program which SIGPIPE ends."""

OURS = "WHEREFORMER_TRACEBACK"
"""The environment variable that also prints the traceback of a fault of ours."""

NO_MEMORY = ("allocate memory", "out of memory", "can't start new thread", "failed to map segment")
"""Parts of the errors of libraries that got no memory. A thread needs some for its stack, a library for its code."""


@contextmanager
def ending(command: Any = None) -> Iterator[None]:
    """Turn what goes wrong in a command, or in reading the command line if there is none yet, into its exit.

    Raises:
        SystemExit: with code 2 for bad input, 1 for a fault of ours, 130 after Ctrl-C, and 141, without a word, where
            the reader of the output has closed it.
    """
    _usable_streams()
    pressed: list[int] = []
    try:
        with _interruptible(pressed):
            try:
                yield
            finally:
                _flush()
    except KeyboardInterrupt as stop:
        raise SystemExit(_interrupted(command, str(stop))) from None
    except BrokenPipeError:
        _silence()
        raise SystemExit(CLOSED) from None
    except Exception as error:
        # Some libraries turn an interrupt during their import into an error of their own.
        raise SystemExit(_interrupted(command) if pressed else _failed(error, command)) from None


def _interrupted(command: Any, kept: str = "") -> int:
    if command is not None:
        kept = kept or getattr(command, "INTERRUPTED", "finished work is kept, and the same command continues")
    return fail(f"interrupted{kept and '; '}{kept}", 130)


def fail(message: str, code: int = 2) -> int:
    """Print one line to stderr, if no other process of this run has failed before, and return the exit code."""
    return errors.fail(message, code) if ranks.is_first_to_fail() else code


def _failed(error: Exception, command: Any) -> int:
    if isinstance(error, InputError):
        return fail(str(error) if command is None else in_flags(error, command))
    if full := full_disk(error):
        return fail(no_room(getattr(error, "filename", None) or "the output", full))
    if isinstance(error, OSError):
        return fail(_with_option(error, command))
    if isinstance(error, RuntimeError) and ranks.another_failed():
        return 2  # the connection to a process was lost that has failed, and has said why
    if ranks.lost_another(error):
        return fail("another process of this run ended unexpectedly; the same command continues")
    if isinstance(error, MemoryError) or any(part in str(error) for part in NO_MEMORY):
        # What libraries do at the end needs memory, too, and would print a traceback.
        sys.unraisablehook = lambda _: None
        return fail(f"not enough memory for these sizes ({str(error) or type(error).__name__})")
    text = f"whereformer {__version__}\n{sys.argv}\n\n{''.join(traceback.format_exception(error))}"
    if os.environ.get(OURS):
        print(text, file=sys.stderr)
    found = (str(error).splitlines() or [""])[0]
    return fail(
        f"internal error in whereformer, please report it: {type(error).__name__}: {found:.200}{_kept(text, command)}",
        1,
    )


def _with_option(error: OSError, command: Any) -> str:
    """Describe a system's error, after the option whose path, or a file in or a folder above it, it is about."""
    if command is None or not isinstance(error.filename, str):
        return str(error)
    at = Path(error.filename.removesuffix(".partial"))
    for name in vars(command):
        given = getattr(command, name)
        if isinstance(given, Path) and (at.is_relative_to(given) or (at != Path() and given.is_relative_to(at))):
            return in_flags(InputError(name, f"{error.strerror}: {error.filename!r}"), command)
    return str(error)


def _kept(text: str, command: Any) -> str:
    """Write a traceback to a file in the run's folder, or in that of temporary files, and say where it is."""
    out = getattr(command, "out", None)
    beside = [out] if isinstance(out, Path) and out.is_dir() else []
    for folder in (*beside, Path(tempfile.gettempdir())):
        with suppress(OSError):
            number, name = tempfile.mkstemp(prefix="error-", suffix=".txt", dir=folder)
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return f" (its traceback is in {name})"
    return ""


@contextmanager
def _interruptible(pressed: list[int]) -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, and note it in ``pressed``, unless this process ignores it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, stop)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _usable_streams() -> None:
    """Give both outputs a place to write to, and characters that their encoding lacks an escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the command began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Write what is buffered. When Python exits, it would complain in its own way."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "the standard output") from None


def _silence() -> None:
    """Send the rest of a closed output nowhere, or Python would complain of it again when it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
