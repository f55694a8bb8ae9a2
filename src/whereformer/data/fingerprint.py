"""Hashes by which results and caches tell texts apart. A text's is remembered as long as its files do not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ..errors import InputError
from ..lab import ranks
from ..lab.json_files import from_json, read_json, write_json
from ..lab.progress import Progress
from .read import Stamp, stamp

FORMAT = 2
"""Format version of a record."""


class TextHash:
    """A short hash of texts in their order.

    Each text is followed by its length in bytes, so that no character can stand for the end of one.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, parts: Iterable[str]) -> int:
        """Add a text that comes in parts, and return its number of characters."""
        size = characters = 0
        for part in parts:
            data = part.encode()
            self._digest.update(data)
            size += len(data)
            characters += len(part)
        self._digest.update(size.to_bytes(8, "little"))
        return characters

    def short(self) -> str:
        """Return the hash of all texts so far, 16 characters."""
        return self._digest.hexdigest()[:16]


@dataclass(frozen=True)
class Summary:
    """A text in short: a hash of all of it, and the number of its documents and characters."""

    fingerprint: str
    documents: int
    characters: int


def summary_of(documents: Iterable[Iterable[str]]) -> Summary:
    """Read all documents, each in parts, and summarize them."""
    found, count, characters = TextHash(), 0, 0
    for document in documents:
        characters += found.add(document)
        count += 1
    return Summary(found.short(), count, characters)


def fingerprint(documents: Iterable[str]) -> str:
    """Return a short hash of the text, so that results from different texts can be told apart."""
    return summary_of([document] for document in documents).fingerprint


class Readable(Protocol):
    """A text in files, which is read anew in every pass."""

    field: str
    """The argument that errors about all of it name."""
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
class SeenText:
    """A text that has been read: its summary, and its files just before."""

    summary: Summary
    files: list[Stamp]


def look_at(text: Readable, cache: Path) -> SeenText:
    """Summarize a text. Its files are read only if they have changed since :func:`remember` recorded them in ``cache``.

    Raises:
        InputError: if the text can't be read.
    """
    files = _files_of(text)
    try:
        summary = from_json(Summary, read_json(_record(text, files, cache)))
    except (OSError, ValueError):  # there is no record, or it is damaged
        text.progress.start(sum(size for _, size, _ in files))
        text.progress.begin("reading the text")
        summary = text.summarize()
    return SeenText(summary, files)


def remember(text: Readable, seen: SeenText, cache: Path) -> None:
    """Record a text that was read from files. Of several processes, the main one does it.

    If the record can't be written, for example to somebody else's cache, the text is read again next time.
    """
    record = _record(text, seen.files, cache)
    if ranks.is_main() and seen.files and not record.exists():
        with suppress(OSError):  # also where another command writes the same record now
            write_json(record, asdict(seen.summary))


def check_unchanged(text: Readable, seen: SeenText) -> None:
    """Check that the files are still those that were read.

    Raises:
        InputError: if one has changed.
    """
    if _files_of(text) != seen.files:
        raise InputError(text.field, "the text changed while it was read; run the same command again")


def _files_of(text: Readable) -> list[Stamp]:
    return [stamp(text.field, path) for path in text.files]


def _record(text: Readable, files: Sequence[Stamp], cache: Path) -> Path:
    """Return the file that records a text with these files. Other sizes or times have another record."""
    key = hashlib.sha256(json.dumps([FORMAT, *text.names, *files]).encode()).hexdigest()
    return cache / f"text-{key[:16]}.json"
