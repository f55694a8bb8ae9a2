"""``BoundedCache``: values that are computed once per key; and the one switch of all caches."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any
from weakref import WeakSet

_lock = Lock()
_enabled = os.environ.get("WHEREFORMER_REMEMBER") != "0"


class BoundedCache:
    """Holds the values of at most ``max_size`` keys, and drops the oldest first. Threads share it."""

    def __init__(self, max_size: int) -> None:
        self.values: dict[object, Any] = {}
        self._max_size = max_size
        with _lock:
            _caches.add(self)

    def put(self, key: object, value: object) -> None:
        """Store a value, unless caches are switched off."""
        with _lock:
            if _enabled:
                self.values[key] = value
            while len(self.values) > self._max_size:
                del self.values[next(iter(self.values))]


_caches: WeakSet[BoundedCache] = WeakSet()


def remember(on: bool) -> None:
    """Switch all caches on or off, and empty them. With ``WHEREFORMER_REMEMBER=0`` in the environment they start off.

    Results are the same bits either way. If they are not, a key lacks something that the value depends on.
    """
    global _enabled
    with _lock:
        _enabled = on
        for cache in _caches:
            cache.values.clear()
