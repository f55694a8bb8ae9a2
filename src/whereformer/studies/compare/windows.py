"""Training windows that grow: short ones at first, so that methods without offsets also learn to use position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...data.masks import Batches

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
    if length <= FIRST:
        return [length] * steps
    between: list[int] = []
    while FIRST << len(between) + 1 < length:
        between.append(FIRST << len(between) + 1)
    found: list[int] = []
    for step in range(steps):
        share = step / max(1, steps - 1)
        if share < FIRST_SHARE:
            found.append(FIRST)
        elif share >= 1 - LAST_SHARE or not between:
            found.append(length)
        else:
            stage = (share - FIRST_SHARE) / (1 - FIRST_SHARE - LAST_SHARE) * len(between)
            found.append(between[min(int(stage), len(between) - 1)])
    return found


@dataclass(frozen=True)
class GrowingBatches:
    """The batches of a training whose windows grow. Each has about the same number of tokens.

    Args:
        batches: the batches with the longest windows.
        lengths: tokens in the windows of each step.
    """

    batches: Batches
    lengths: Sequence[int]

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the input ids and labels of one step, (rows, length) each."""
        length = self.lengths[step]
        rows = self.batches.batch_size * self.batches.length // length
        return replace(self.batches, batch_size=rows, length=length)[step]
