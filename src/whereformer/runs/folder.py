"""A run's output folder, which one command at a time may write to."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from ..errors import InputError


def open_folder(out: Path) -> TextIO:
    """Make the output folder, make sure that it can be written, and keep other commands out of it.

    Returns:
        The lock, held until it is closed.

    Raises:
        InputError: if that can't be done.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise InputError("out", f"cannot write {out}: {error.strerror or error}") from None
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # no such locks on this system
    except OSError:
        lock.close()
        raise InputError("out", f"another command is writing to {out}; wait for it or choose another folder") from None
    return lock
