"""Write files and folders in one step and to the disk itself; refuse what is no file; say when the disk is full."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import LONGEST_NAME, InputError, shown

FULL = {errno.ENOSPC: "no space left on the disk", errno.EFBIG: "the file is larger than is permitted here"}
"""What the system's errors about a full disk mean."""
if hasattr(errno, "EDQUOT"):
    FULL[errno.EDQUOT] = "the disk quota is used up"
_RUST = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers tell the number of a system's error."""
_ZIP_WRITER = ("inline_container", "PytorchStreamWriter", "iostream error")
"""Parts of the errors of torch.save, which does not say why it cannot write."""
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that it always holds either the old content or all of the new. Text is written as UTF-8.

    Raises:
        InputError: if something else than a regular file is there, or the disk is full.
    """
    check_file(None, path)
    partial = path.with_name(path.name + ".partial")
    _remove(partial)
    try:
        with naming(path):
            with partial.open("xb") as file:
                file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            _sync(partial)
            os.replace(partial, path)
            _sync(path.parent)
    finally:
        _remove(partial)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside ``folder`` to fill, and put it in place of ``folder`` when it is complete.

    After an error ``folder`` is as it was.

    Raises:
        InputError: if the disk is full.
    """
    partial = folder.with_name(folder.name + ".partial")
    _remove(partial)
    try:
        with naming(folder):
            partial.mkdir(parents=True)
            yield partial
            move_folder(partial, folder)
    finally:
        _remove(partial)


def move_folder(source: Path, target: Path) -> None:
    """Write all of a folder to the disk itself, then put it in place of ``target``, which may exist."""
    for place, _, files in os.walk(source):
        for name in files:
            _sync(Path(place, name))
        _sync(Path(place))
    if target.exists():
        shutil.rmtree(target)
    os.replace(source, target)
    _sync(target.parent)


def check_file(field: str | None, path: Path) -> None:
    """Check that an output file is new or a regular file: devices and links are not replaced.

    Raises:
        InputError: for ``field``, if it is something else.
    """
    if os.path.lexists(path) and (found := _kind(path.lstat().st_mode)) != "a file":
        raise InputError(field, f"expected a file or a new name, got {found}: {str(path)!r}")


def check_regular(field: str | None, *paths: Path) -> None:
    """Check that input files are regular files: a pipe, a socket or a device may keep its reader waiting or never end.

    Raises:
        InputError: for ``field``, if one is something else, is not there, or cannot be seen.
    """
    for path in paths:
        try:
            found = _kind(path.stat().st_mode)
        except FileNotFoundError:
            raise InputError(field, f"no such file: {shown(str(path), LONGEST_NAME)}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(field, f"cannot read {shown(str(path), LONGEST_NAME)}: {reason}") from None
        if found != "a file":
            raise InputError(field, f"expected a file, got {found}: {shown(str(path), LONGEST_NAME)}")


def check_regular_in(field: str | None, folder: str | Path) -> None:
    """Check a folder whose files another library reads, such as a tokenizer's: all that is no folder is a regular file.

    Anything else, such as the id of a model on the Hub, has nothing to check.

    Raises:
        InputError: as :func:`check_regular` does.
    """
    try:
        inside = [*Path(folder).iterdir()] if Path(folder).is_dir() else []
    except OSError as error:
        raise InputError(field, f"cannot read {shown(str(folder), LONGEST_NAME)}: {error.strerror or error}") from None
    check_regular(field, *(path for path in inside if path.exists() and not path.is_dir()))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk, whichever library raises them, into one line that names ``path``.

    Raises:
        InputError: if the disk is full.
    """
    try:
        yield
    except Exception as error:
        reason = full_disk(error)
        if reason is None or isinstance(error, InputError):
            raise
        raise InputError(None, no_room(path, reason)) from None


def full_disk(error: BaseException) -> str | None:
    """Return what is full if an error says that nothing more can be written, else None."""
    if isinstance(error, OSError) and error.errno is not None:
        return FULL.get(error.errno)
    found = _RUST.search(str(error))
    if found is not None:
        return FULL.get(int(found[1]))
    if isinstance(error, RuntimeError) and any(part in str(error) for part in _ZIP_WRITER):
        return "the disk is full or cannot be written"
    return None


def no_room(path: Path | str, reason: str) -> str:
    """Return the line that tells a user about a full disk."""
    return f"cannot write {path}: {reason}; make room, then run the same command again"


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _sync(path: Path) -> None:
    """Write a file or folder to the disk itself, where the system can."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network folders have nothing to sync
            raise
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
