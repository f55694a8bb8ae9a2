"""What is measured, and how."""

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
    """What to measure and how.

    Args:
        kinds, lengths, dtypes: the cases, each forward and in training.
        batch: None for 4, and 1 beyond 2048 keys.
        heads, head_dim: of all cases.
        rounds: how often each way is timed.
        threads: of torch on the CPU.
        memory_limit: bytes; what would need more is not tried.
        device: where.
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
        """All cases, in the order of measuring."""
        return [
            Case(kind, n, self.batch or (BATCH if n <= LONG else 1), self.heads, self.head_dim, dtype, training)
            for dtype in self.dtypes
            for kind in self.kinds
            for n in self.lengths
            for training in (False, True)
        ]
