"""A run's output folder, locked so that only one command at a time writes to it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ..errors import InputError
from .ranks import is_main


def open_folder(out: Path, field: str = "out") -> AbstractContextManager[Any]:
    """Create a folder, and lock it against other commands.

    Args:
        out: the folder.
        field: the argument that an error names.

    Returns:
        The lock, held until it is closed. Of several processes of a run, only the main one holds it.

    Raises:
        InputError: if another command holds its lock.
        OSError: if it can't be written.
    """
    if not is_main():
        return nullcontext()
    out.mkdir(parents=True, exist_ok=True)
    lock = (out / ".lock").open("a")
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # this system has no such locks
    except BlockingIOError:
        lock.close()
        raise InputError(field, f"another command is writing to {out}; wait for it or choose another folder") from None
    return lock
