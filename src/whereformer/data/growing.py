"""Training windows that grow: short ones at first, so that methods without offsets also learn to use position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .masks import Batches

FIRST = 8
"""Tokens in the first windows."""
FIRST_SHARE = 0.4
"""Share of the steps that have the first windows."""
LAST_SHARE = 0.4
"""Share of the steps that have the longest windows. The lengths between share the other steps evenly."""


def window_lengths(length: int, steps: int) -> list[int]:
    """Return how many tokens the windows of each step have: 8 at first, then twice as many, and at last ``length``.

    With 64 tokens, windows have 8 tokens for 40% of the steps, 16 up to 50%, 32 up to 60%, and 64 from there on.
    """
    lengths = [FIRST]
    while lengths[-1] < length:
        lengths.append(2 * lengths[-1])
    between, found = lengths[1:-1], []
    for step in range(steps):
        share = step / max(1, steps - 1)
        if share < FIRST_SHARE:
            found.append(min(FIRST, length))
        elif share >= 1 - LAST_SHARE or not between:
            found.append(length)
        else:
            stage = (share - FIRST_SHARE) / (1 - FIRST_SHARE - LAST_SHARE) * len(between)
            found.append(between[min(int(stage), len(between) - 1)])
    return found


def growing(batches: Batches, steps: int) -> Callable[[int], dict[str, Tensor]]:
    """Return what makes the input ids and labels of a step, (rows, length) each, with about as many tokens in each.

    Args:
        batches: the batches with the longest windows.
        steps: the number of steps.
    """
    lengths = window_lengths(batches.length, steps)

    def batch(step: int) -> dict[str, Tensor]:
        rows = batches.batch_size * batches.length // lengths[step]
        inputs, labels = replace(batches, batch_size=rows, length=lengths[step])[step]
        return {"input_ids": inputs, "labels": labels}

    return batch
