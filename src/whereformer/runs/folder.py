"""A run's output folder, locked so that only one command at a time writes to it."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from ..errors import InputError


def open_folder(out: Path) -> TextIO:
    """Create the output folder, check that it is writable, and lock it against other commands.

    Returns:
        The lock, held until it is closed.

    Raises:
        InputError: if the folder can't be written, or another command holds its lock.
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
        pass  # this system has no such locks
    except OSError:
        lock.close()
        raise InputError("out", f"another command is writing to {out}; wait for it or choose another folder") from None
    return lock
