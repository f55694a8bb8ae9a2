"""Memory that nobody has written yet holds NaN, so that a number that is read too early, or never written, shows.

Otherwise such memory often holds zeros, or what the last call computed there, and tests pass by luck.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from whereformer.kernels.cpu.workspace import Workspace


def poison() -> None:
    """From now on, in this process.

    Fresh tensors (``torch.empty`` and its kind) are torch's own business: it fills them where algorithms have to be
    deterministic, floats with NaN and integers with their largest number. Bytes of 255 are NaN in every float's format,
    so they serve for the memory that the CPU's backends use again: before it is handed out, and when its scope ends.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    take, scope = Workspace.take, Workspace.scope

    def poisoned_take(self: Workspace, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = take(self, size, dtype)
        if memory.numel():
            memory.view(-1).view(torch.uint8).fill_(255)
        return memory

    @contextmanager
    def poisoned_scope(self: Workspace) -> Iterator[None]:
        taken = self._taken
        with scope(self):
            try:
                yield
            finally:
                for slot in self._slots[taken : self._taken]:
                    slot.fill_(255)

    Workspace.take, Workspace.scope = poisoned_take, poisoned_scope  # type: ignore[method-assign]


def is_poisoned(tensor: torch.Tensor) -> bool:
    return all(math.isnan(number) for number in tensor.flatten().tolist())
