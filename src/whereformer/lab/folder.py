"""A run's output folder, locked so that only one command at a time writes to it."""

from __future__ import annotations

import os
import stat
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from ..errors import InputError
from ..files import check_folder, full_disk, no_room
from .ranks import is_main


def open_folder(out: Path) -> AbstractContextManager[Any]:
    """Create the output folder, check that it is writable, and lock it against other commands.

    Returns:
        The lock, held until it is closed. Of several processes of a run, only the main one holds it.

    Raises:
        InputError: if the folder can't be written, is a link, or another command holds its lock.
    """
    if not is_main():
        return nullcontext()
    try:
        check_folder("out", out)
        out.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(out / ".lock")
    except OSError as error:
        full = full_disk(error)
        reason = no_room(out, full) if full else f"cannot write {out}: {error.strerror or error}"
        raise InputError("out", reason) from None
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # this system has no such locks
    except OSError:
        lock.close()
        raise InputError("out", f"another command is writing to {out}; wait for it or choose another folder") from None
    return lock


def _open_lock(path: Path) -> TextIO:
    """Open a lock file without following a link or waiting for a pipe, and without changing what is in it."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError("out", f"expected a file or a new name, got something else: {str(path)!r}")
    return os.fdopen(handle, "r+", encoding="utf-8")
