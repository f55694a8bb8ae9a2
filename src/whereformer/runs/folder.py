"""A run's output folder, locked so that only one command at a time writes to it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ..errors import InputError
from .ranks import is_main


def open_folder(out: Path) -> AbstractContextManager[Any]:
    """Create the output folder, check that it is writable, and lock it against other commands.

    Returns:
        The lock, held until it is closed. Of several processes of a run, only the main one holds it.

    Raises:
        InputError: if the folder can't be written, or another command holds its lock.
    """
    if not is_main():
        return nullcontext()
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
