"""``Memory``: what is computed once for a key and then found again; and the one switch of all memories."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any
from weakref import WeakSet

_lock = Lock()
_remembers = os.environ.get("WHEREFORMER_REMEMBER") != "0"


class Memory:
    """The values of a number of keys at most; the oldest is forgotten first. Threads share it."""

    def __init__(self, most: int) -> None:
        self.values: dict[Any, Any] = {}
        self._most = most
        with _lock:
            _memories.add(self)

    def put(self, key: Any, value: Any) -> None:
        """Remember a value, unless memories are switched off."""
        with _lock:
            if _remembers:
                self.values[key] = value
            while len(self.values) > self._most:
                del self.values[next(iter(self.values))]


_memories: WeakSet[Memory] = WeakSet()


def remember(on: bool) -> None:
    """Switch all memories on or off, and forget all that they hold. ``WHEREFORMER_REMEMBER=0`` begins with them off.

    Results are the same bits either way. If they are not, a key is missing something.
    """
    global _remembers
    with _lock:
        _remembers = on
        for memory in _memories:
            memory.values.clear()
