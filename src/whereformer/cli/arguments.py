"""Reading what options say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> torch.device:
    """The device of a ``--device`` field.

    Raises:
        InputError: for a GPU that isn't there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "expected cpu or auto, got cuda, which torch does not find here")
    return torch.device(name)


def split(field: str, text: str, known: Sequence[str] | None = None) -> list[str]:
    """The different parts of a list with commas, each of them known.

    Raises:
        InputError: naming the field.
    """
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise InputError(field, "expected at least one, got none")
    for part in parts:
        if known is not None and part not in known:
            raise InputError(field, f"expected {', '.join(known)}, got {part!r}")
    return parts
