"""Write files and folders in one step and to the disk; read only regular files; say when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import MAX_NAME, InputError, one_line, short_repr

DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""The system's errors about a full disk: of the disk, of a limit of a file's size, and of a quota."""
_DISK_FULL_TEXT = re.compile(
    rf"\(os error ({'|'.join(map(str, DISK_FULL))})\)|inline_container|PytorchStreamWriter|iostream error"
)
"""Parts of the errors of safetensors, tokenizers and torch.save when the disk is full."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that it always holds either the old content or all of the new. Text is written as UTF-8.

    If ``path`` is a link, the file that it leads to is written.

    Raises:
        InputError: if the disk is full.
    """
    target = _follow(path)
    partial = target.with_name(target.name + ".partial")
    remove(partial)
    try:
        with name_full_disk(path):
            with partial.open("xb") as file:
                file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            _sync(partial)
            os.replace(partial, target)
            _sync(target.parent)
    finally:
        remove(partial)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to ``folder`` to fill, and put it in place of ``folder`` when it is complete.

    After an error, ``folder`` is unchanged. If it is a link, the folder that it leads to is replaced.

    Raises:
        InputError: if the disk is full; or, before anything is filled, if ``folder`` cannot be replaced.
    """
    check_replaceable(None, folder)
    target = _follow(folder)
    partial = target.with_name(target.name + ".partial")
    remove(partial)
    try:
        with name_full_disk(folder):
            partial.mkdir(parents=True)
            yield partial
            move_folder(partial, target)
    finally:
        remove(partial)


def move_folder(source: Path, target: Path) -> None:
    """Write all of a folder to the disk itself, then put it in place of ``target``, which may exist."""
    for folder, _, files in os.walk(source):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    check_replaceable(None, target)  # again, since filling it may take long
    if target.exists():
        shutil.rmtree(target)
    os.replace(source, target)
    _sync(target.parent)


def check_replaceable(field: str | None, folder: Path) -> None:
    """Raise an InputError for ``field`` if a path has a folder that cannot be replaced, or anything but a folder."""
    _check_folder(field, folder)
    name = short_repr(str(folder), MAX_NAME)
    if os.path.ismount(_follow(folder)):
        raise InputError(field, f"a disk is mounted at {name}, so it cannot be replaced; mount it at a folder above")
    for subfolder, _, _ in os.walk(_follow(folder)):
        if not os.access(subfolder, os.W_OK | os.X_OK):
            raise InputError(field, f"cannot replace {name}: {short_repr(subfolder, MAX_NAME)} is read-only")


def check_outputs(field: str, out: Path, files: Iterable[str], folders: Iterable[str]) -> None:
    """Check, before any work, that files and folders in ``out`` can be written or replaced.

    Raises:
        InputError: for ``field``, if one of them, or a folder above it, is of another kind, or cannot be replaced.
    """
    for file in (out / name for name in files):
        _check_no_broken_link(field, file)
        if file.exists():
            check_regular(field, file)
    for folder in (out / name for name in folders):
        for above in folder.relative_to(out).parents:
            _check_folder(field, out / above)
        check_replaceable(field, folder)


def _check_folder(field: str | None, path: Path) -> None:
    """Check that there is a folder at a path, or nothing."""
    _check_no_broken_link(field, path)
    if path.exists() and not path.is_dir():
        kind = "a file" if path.is_file() else "a pipe, socket or device"
        raise InputError(field, f"expected a folder or nothing, got {kind}: {short_repr(str(path), MAX_NAME)}")


def _check_no_broken_link(field: str | None, path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise InputError(field, f"{short_repr(str(path), MAX_NAME)} is a link that leads nowhere; remove or mend it")


def _follow(path: Path) -> Path:
    """Return the path that a link leads to, and any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_regular(field: str | None, *paths: Path) -> None:
    """Raise an InputError for ``field`` if an input file is not a regular file, is not there, or cannot be seen.

    A pipe, a socket or a device may keep its reader waiting or never end.
    """
    for path in paths:
        name = short_repr(str(path), MAX_NAME)
        try:
            path.stat()
        except FileNotFoundError:
            raise InputError(field, f"no such file: {name}") from None
        except (OSError, ValueError) as error:
            raise InputError(field, f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe, socket or device"
            raise InputError(field, f"expected a file, got {kind}: {name}")


def check_regular_in(field: str | None, folder: str | Path) -> None:
    """Check that a folder of files for another library, such as a tokenizer's, has only folders and regular files.

    Anything else, such as the id of a model on the Hub, has nothing to check. Errors are as in :func:`check_regular`.
    """
    inside = Path(folder).iterdir() if os.path.isdir(folder) else ()  # False for names that are too long
    check_regular(field, *(path for path in inside if path.exists() and not path.is_dir()))


def read_json(field: str, file: Path, kind: type) -> Any:
    """Read a ``dict`` or a ``list`` from an untrusted JSON file.

    Raises:
        InputError: for ``field``, if it is not a regular file, not JSON, or of another type.
    """
    check_regular(field, file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(field, f"{file} can't be read ({one_line(str(error))})") from None
    if not isinstance(content, kind):
        raise InputError(field, f"expected a {kind.__name__} in {file}, got {short_repr(content)}")
    return content


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk, whichever library raises them, into an InputError that names ``path``."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise InputError(None, format_no_space(path)) from None


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error says that nothing more can be written."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL
    return not isinstance(error, InputError) and _DISK_FULL_TEXT.search(str(error)) is not None


def format_no_space(path: Path | str) -> str:
    """Return a user's error about a full disk."""
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


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
