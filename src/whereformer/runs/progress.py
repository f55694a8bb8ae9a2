"""What a long run tells about its progress."""

from __future__ import annotations


class Progress:
    """What :func:`run` tells about its progress; every method does nothing here."""

    def start(self, steps: int) -> None:
        """The whole job has this number of steps."""

    def begin(self, label: str) -> None:
        """A part of the job begins."""

    def step(self, steps: int = 1, detail: str = "") -> None:
        """This number of steps is done."""

    def line(self, text: str) -> None:
        """Something is worth a line."""
