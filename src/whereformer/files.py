"""Write files and folders in one step and to the disk; read only what is a file; say when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import LONGEST_NAME, InputError, one_line, shown

FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""The system's errors about a full disk: of the disk, of a limit of a file's size, and of a quota."""
_IN_WORDS = re.compile(
    rf"\(os error ({'|'.join(map(str, FULL))})\)|inline_container|PytorchStreamWriter|iostream error"
)
"""How safetensors and tokenizers tell such an error, and torch.save that it cannot write."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that it always holds either the old content or all of the new. Text is written as UTF-8.

    Raises:
        InputError: if the disk is full.
    """
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
        if not target.is_dir():  # rmtree would wait for a pipe's other end
            raise NotADirectoryError(errno.ENOTDIR, "expected a folder", str(target))
        shutil.rmtree(target)
    os.replace(source, target)
    _sync(target.parent)


def check_regular(field: str | None, *paths: Path) -> None:
    """Check that input files are regular files: a pipe, a socket or a device may keep its reader waiting or never end.

    Raises:
        InputError: for ``field``, if one is something else, is not there, or cannot be seen.
    """
    for path in paths:
        named = shown(str(path), LONGEST_NAME)
        try:
            path.stat()
        except FileNotFoundError:
            raise InputError(field, f"no such file: {named}") from None
        except (OSError, ValueError) as error:
            raise InputError(field, f"cannot read {named}: {getattr(error, 'strerror', None) or error}") from None
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe, socket or device"
            raise InputError(field, f"expected a file, got {kind}: {named}")


def check_regular_in(field: str | None, folder: str | Path) -> None:
    """Check a folder whose files another library reads, such as a tokenizer's: all that is no folder is a regular file.

    Anything else, such as the id of a model on the Hub, has nothing to check.

    Raises:
        InputError: as :func:`check_regular` does.
    """
    inside = Path(folder).iterdir() if os.path.isdir(folder) else ()  # False for names that are too long
    check_regular(field, *(path for path in inside if path.exists() and not path.is_dir()))


def read_json(field: str, file: Path, kind: type) -> Any:
    """Read what an untrusted JSON file holds, a ``dict`` or a ``list``.

    Raises:
        InputError: for ``field``, if it is no regular file, no JSON, or something else.
    """
    check_regular(field, file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(field, f"{file} can't be read ({one_line(str(error))})") from None
    if not isinstance(found, kind):
        raise InputError(field, f"expected a {kind.__name__} in {file}, got {shown(found)}")
    return found


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk, whichever library raises them, into one line that names ``path``.

    Raises:
        InputError: if the disk is full.
    """
    try:
        yield
    except Exception as error:
        if not full_disk(error):
            raise
        raise InputError(None, no_room(path)) from None


def full_disk(error: BaseException) -> bool:
    """Return whether an error says that nothing more can be written."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return not isinstance(error, InputError) and _IN_WORDS.search(str(error)) is not None


def no_room(path: Path | str) -> str:
    """Return the line that tells a user about a full disk."""
    return f"cannot write {path}: no space left on the disk; make room, then run the same command again"


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
