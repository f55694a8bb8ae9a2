"""``TextHash``, by which results and caches tell texts apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


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
