"""Limits of options that several recipes have, and functions that read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..errors import InputError, short_repr

if TYPE_CHECKING:
    import torch

MAX_SIZE = 2**20
"""The largest width, length, vocabulary or number of rows at a time. Larger ones do not fit into memory."""
MAX_COUNT = 2**31 - 1
"""The largest number of steps, tokens and other things that are processed one after another."""
MAX_SEED = 2**32 - 1
"""The largest seed of random numbers."""
MAX_RATE = 1e6
"""The largest learning rate, number of epochs and the like."""
MAX_RUNS = 1024
"""The most seeds, processes and threads. If a system can't start more threads, the process ends without a message."""


def find_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" names; an InputError if it is "cuda", and torch finds no GPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "expected cpu or auto, got cuda, but torch finds no GPU here")
    return torch.device(name)


def parse_options(text: str | None) -> dict[str, object]:
    """Parse a position method's options; an InputError for ``position_options`` if they are not a JSON object."""
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        expected = "expected a JSON object such as '{\"num_kernels\": 3}'"
        raise InputError("position_options", f"{expected}, got {short_repr(text)}")
    return options


def canonical_options(text: str | None) -> str | None:
    """Return the options in one canonical form, so that they can be compared with a folder's settings."""
    return None if text is None else json.dumps(parse_options(text), sort_keys=True)
