"""The interface through which a long run reports its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sheet import Sheet


class Progress:
    """Receives the progress of a run. This base class ignores it; subclasses show it."""

    def start(self, steps: int) -> None:
        """Called when a job begins and the number of its steps is known."""

    def begin(self, label: str) -> None:
        """Called when a part of the job begins."""

    def step(self, steps: int = 1, detail: str = "") -> None:
        """Called when ``steps`` more steps are done."""

    def line(self, text: str | Sheet) -> None:
        """Called with a line of text, or a table, for the user."""
