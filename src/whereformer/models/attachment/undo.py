"""Changes of a model, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Collects what takes back each of a series of changes. Copied or pickled with a model, it is about the copy."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], Any]] = []

    def add(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Note the call that takes back a change that was just made."""
        self._actions.append(partial(action, *arguments))

    def run(self) -> None:
        """Take everything back, the last change first."""
        while self._actions:
            self._actions.pop()()
