"""Summarize a text once, and remember the result for as long as its files do not change."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ..errors import InputError
from ..lab import ranks
from ..lab.json_files import check_seal, from_json, read_json, sealed, write_json
from ..lab.progress import Progress
from .corpus import Summary
from .shards import Entry

FORMAT = 1
"""Format version of a record."""
SETTLED = 2_000_000
"""Microseconds. A file that changed less than this before it was read may change again under the same time stamp."""


class Readable(Protocol):
    """A text in files, which is read anew in every pass.

    Args:
        field: the argument that errors about all of it name.
        progress: is told what happens.
    """

    field: str
    progress: Progress

    @property
    def files(self) -> Sequence[Path]:
        """The files, in the order in which they are read."""

    @property
    def names(self) -> Sequence[str]:
        """What decides, besides the files, which text it is."""

    def summarize(self) -> Summary:
        """Read all of it and summarize it."""


@dataclass(frozen=True)
class SeenFile:
    """A file when it was read: its path, its size in bytes, and when it changed last (µs)."""

    path: str
    size: int
    changed: int


@dataclass(frozen=True)
class SeenText:
    """A text that has been read.

    Args:
        summary: the text in short.
        files: its files, just before they were read.
        time: when that was (µs).
    """

    summary: Summary
    files: list[SeenFile]
    time: int
    format: int = FORMAT

    @property
    def settled(self) -> bool:
        """Whether a later change of a file is sure to change its size or its time."""
        return bool(self.files) and all(file.changed + SETTLED < self.time for file in self.files)


def look_at(text: Readable, cache: Path) -> SeenText:
    """Summarize a text. Its files are read only if they have changed since :func:`remember` recorded them.

    Args:
        text: the text.
        cache: the folder with the records.

    Raises:
        InputError: if the text can't be read.
    """
    files, now = files_of(text), time.time_ns() // 1000
    seen = _remembered(text, cache)
    if seen is not None and seen.format == FORMAT and seen.settled and seen.files == files:
        return seen
    text.progress.start(sum(file.size for file in files))
    text.progress.begin("reading the text")
    return SeenText(text.summarize(), files, now)


def remember(text: Readable, seen: SeenText, cache: Path) -> None:
    """Record a text that was read, unless the record says the same. Of several processes, the main one does it.

    If the record can't be written, for example to somebody else's cache, the text is read again next time.
    """
    if ranks.is_main() and seen.settled and seen != _remembered(text, cache):
        with suppress(OSError):  # also where another command writes the same record now
            write_json(_record(text, cache), sealed(asdict(seen)))


def check_unchanged(text: Readable, seen: SeenText, entry: Entry) -> None:
    """Check that the files are still those that were read; if they are not, what was encoded is forgotten.

    Raises:
        InputError: if a file has changed.
    """
    if files_of(text) != seen.files:
        entry.drop()
        raise InputError(text.field, "the text changed while it was read; run the same command again")


def _remembered(text: Readable, cache: Path) -> SeenText | None:
    try:
        content = read_json(_record(text, cache))
        check_seal(content)
        return from_json(SeenText, content)
    except (OSError, ValueError):
        return None  # there is no record, or it is damaged


def files_of(text: Readable) -> list[SeenFile]:
    """Return the files of a text as they are now.

    Raises:
        InputError: if one is not there.
    """
    found = []
    for path in text.files:
        try:
            status = path.stat()
        except OSError as error:
            raise InputError(text.field, f"cannot read {path}: {error.strerror or error}") from None
        found.append(SeenFile(str(path.absolute()), status.st_size, status.st_mtime_ns // 1000))
    return found


def _record(text: Readable, cache: Path) -> Path:
    names = [*text.names, *(str(path.absolute()) for path in text.files)]
    key = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    return cache / f"text-{key[:16]}.json"
