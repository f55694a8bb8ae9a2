"""The stages of a pretraining: short windows for most of the steps, then longer ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...errors import InputError, shown
from ...lab.options import MOST_SIZE

SHORTEST = 8
"""The least tokens in a window."""


@dataclass(frozen=True)
class Stage:
    """Steps in a row with windows of one length: ``batch_size`` windows in a batch, and ``batches`` in a step."""

    length: int
    steps: int
    batch_size: int
    batches: int

    @property
    def rows_per_step(self) -> int:
        """Number of windows in a step."""
        return self.batch_size * self.batches


def parsed_lengths(text: str) -> list[tuple[int, float]]:
    """Parse lengths with their shares of the steps, such as "128:0.9,512:0.1".

    Raises:
        InputError: if the text is something else, or the shares do not add up to 1.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = [(int(length), float(share)) for length, share in pairs]
    except ValueError:
        expected = "expected lengths and shares such as '128:0.9,512:0.1'"
        raise InputError("lengths", f"{expected}, got {shown(text)}") from None
    for length, share in found:
        if not (SHORTEST <= length <= MOST_SIZE and 0 < share <= 1):
            expected = f"expected lengths of {SHORTEST} to {MOST_SIZE} and shares above 0 and up to 1"
            raise InputError("lengths", f"{expected}, got {shown(f'{length}:{share:g}')}")
    total = sum(share for _, share in found)
    if abs(total - 1) > 1e-6:
        raise InputError("lengths", f"expected shares that add up to 1, got {total:g} in {shown(text)}")
    return found


def stages_of(lengths: Sequence[tuple[int, float]], steps: int, batch_size: int, batches: int) -> list[Stage]:
    """Divide the steps among the lengths, each with its share. All steps have about the same number of tokens.

    A batch has ``batch_size`` windows of the first length; of longer windows it has fewer, but at least one.

    Raises:
        InputError: if a length gets no step.
    """
    ends = [round(share * steps) for share in accumulate(share for _, share in lengths)]
    found = []
    for (length, _), (start, end) in zip(lengths, pairwise([0, *ends]), strict=True):
        if start == end:
            raise InputError("lengths", f"expected at least one step of each length, got none of {length} in {steps}")
        rows = max(1, round(batch_size * lengths[0][0] / length))
        found.append(Stage(length, end - start, rows, batches))
    return found


class StagedBatches:
    """A batch sampler: the rows of all batches, stage after stage, as a function of the stages alone."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages

    def __len__(self) -> int:
        return sum(stage.steps * stage.batches for stage in self.stages)

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        for stage in self.stages:
            for _ in range(stage.steps * stage.batches):
                yield list(range(first, first + stage.batch_size))
                first += stage.batch_size
