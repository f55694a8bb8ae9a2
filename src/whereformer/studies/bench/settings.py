"""The settings of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cases import Case

BATCH = 4
LONG = 2048
"""With more keys than this, the default batch is one sequence."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure, and how.

    Args:
        kinds, lengths, dtypes: the cases; each is measured forward and in training.
        batch: sequences per call; None for 4, or 1 beyond 2048 keys.
        heads, head_dim: sizes of all cases.
        rounds: how many times each way is timed.
        threads: torch's threads on the CPU.
        memory_limit: bytes; calls that would need more are not tried.
        device: the device to measure.
    """

    kinds: Sequence[str]
    lengths: Sequence[int]
    dtypes: Sequence[str]
    device: torch.device
    memory_limit: int
    batch: int | None = None
    heads: int = 12
    head_dim: int = 64
    rounds: int = 7
    threads: int = 1

    def cases(self) -> list[Case]:
        """Return all cases, in the order in which they are measured."""
        return [
            Case(kind, n, self.batch or (BATCH if n <= LONG else 1), self.heads, self.head_dim, dtype, training)
            for dtype in self.dtypes
            for kind in self.kinds
            for n in self.lengths
            for training in (False, True)
        ]
