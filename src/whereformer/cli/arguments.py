"""Parse the values of options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch


MOST_JOBS = 1024
"""The most runs that a command does at a time."""
MOST_THREADS = 1024
"""The most threads of a process. A system that starts no more of them ends the process without a word."""


def find_device(name: str) -> torch.device:
    """Return the device that a ``--device`` option names: "auto", "cpu" or "cuda".

    Raises:
        InputError: if it is a GPU that torch does not find.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "expected cpu or auto, got cuda, but torch finds no GPU here")
    return torch.device(name)


def split(field: str, text: str, known: Sequence[str] | None = None) -> list[str]:
    """Split a comma-separated list into its distinct parts, which must be among ``known`` if that is given.

    Raises:
        InputError: if there are no parts, or one is unknown; it names the field.
    """
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise InputError(field, "expected at least one, got none")
    for part in parts:
        if known is not None and part not in known:
            raise InputError(field, f"expected {', '.join(known)}, got {part!r}")
    return parts
