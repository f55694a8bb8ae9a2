"""Limits and checks of options that several recipes have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import InputError, short_repr

if TYPE_CHECKING:
    import torch

MOST_SIZE = 2**20
"""The largest width, length, vocabulary or number of rows at a time. Larger ones fit into no memory."""
MOST_COUNT = 2**31 - 1
"""The largest number of steps, tokens and whatever else comes one after another."""
MOST_SEED = 2**32 - 1
"""The largest seed of random numbers."""
MOST_RATE = 1e6
"""The largest learning rate, number of epochs and the like."""
MOST_RUNS = 1024
"""The most seeds, processes and threads. A system that starts no more threads ends a process without a word."""


def find_device(name: str) -> torch.device:
    """Return the device that a ``device`` option names: "auto", "cpu" or "cuda".

    Raises:
        InputError: if it is a GPU that torch does not find.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "expected cpu or auto, got cuda, but torch finds no GPU here")
    return torch.device(name)


def parsed_options(text: str | None) -> dict[str, Any]:
    """Parse a position method's options, a JSON object.

    Raises:
        InputError: for ``position_options``, if the text is something else.
    """
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise InputError(
            "position_options", f"expected a JSON object such as '{{\"num_kernels\": 3}}', got {short_repr(text)}"
        )
    return options


def canonical_options(text: str | None) -> str | None:
    """Return the options in one canonical form, so that they can be compared with a folder's settings."""
    return None if text is None else json.dumps(parsed_options(text), sort_keys=True)
