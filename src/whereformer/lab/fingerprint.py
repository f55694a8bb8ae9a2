"""Hashes by which results and caches tell texts and files apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path


def fingerprint(texts: Iterable[str]) -> str:
    """Return a short hash of texts in their order.

    Each text is followed by its length in bytes, so that no character can stand for the end of one.
    """
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(data)
        digest.update(len(data).to_bytes(8, "little"))
    return digest.hexdigest()[:16]


def fingerprint_of_files(files: Sequence[Path], names: Iterable[str] = ()) -> str:
    """Return a short hash of the bytes of files in their order, which are read once, about a gigabyte a second.

    Args:
        files: the files.
        names: what decides, besides their bytes, what is read, such as a column.
    """
    parts = [*names]
    for file in files:
        with file.open("rb") as data:
            parts += [file.suffix.lower(), hashlib.file_digest(data, "sha256").hexdigest()]
    return fingerprint(parts)
