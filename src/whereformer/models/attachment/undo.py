"""``Undo``: a list of actions that takes back a series of changes to a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Collects the action that takes back each change. A copy or pickle with a model refers to the copied model."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], Any]] = []

    def add(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Record the call that takes back a change that was just made."""
        self._actions.append(partial(action, *arguments))

    def run(self) -> None:
        """Take everything back, the last change first."""
        while self._actions:
            self._actions.pop()()
