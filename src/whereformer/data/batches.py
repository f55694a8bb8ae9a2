"""Group rows of similar length into batches, in random order, so that batches need little padding."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch
from torch import Tensor

BUCKET = 32
"""Number of batches that are sorted by length together: enough for little padding, yet batches stay mostly random."""


class Drawn:
    """The batches of a training, one for each step, in an endless random order.

    Every row is read once before any is read again. In each such epoch, the rows are shuffled and cut into buckets of
    about :data:`BUCKET` batches. Each bucket is sorted by length and cut into batches, and all batches are shuffled.

    Args:
        lengths: (rows, sides), the tokens of each row, such as those of its source and its target.
        most: the most rows of a batch.
        seed: seed of the order.
        tokens: whether ``most`` is the most tokens on each side instead, padding included. A longer row gets a batch of
            its own.
    """

    def __init__(self, lengths: Tensor, most: int, seed: int, *, tokens: bool = False) -> None:
        self.lengths, self.most, self.seed, self.tokens = lengths, most, seed, tokens
        self.order: Iterator[list[int]] = iter(())
        self.step = -1  # the last one

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of each step, forever."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = self.lengths.amax(1) if self.tokens else torch.ones(len(self.lengths), dtype=torch.long)
        while True:
            rows = torch.randperm(len(self.lengths), generator=generator)
            buckets = (sizes[rows].cumsum(0) - 1) // (BUCKET * self.most)
            # Arrays take a ninth of the memory of lists.
            batches = [
                array("i", batch)
                for bucket in rows.split(buckets.bincount().tolist())
                for batch in _cut(bucket, self.lengths, self.most, tokens=self.tokens)
            ]
            for place in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[place].tolist()

    @property
    def per_epoch(self) -> int:
        """The steps that read the whole text once; epochs have about the same number."""
        count, left = 0, len(self.lengths)
        for rows in self:
            count, left = count + 1, left - len(rows)
            if not left:
                break
        return count

    def __call__(self, step: int) -> list[int]:
        """Return the rows of a step from 0 on. The step after the last one is found at once."""
        if self.step < 0 or step <= self.step:
            self.order, self.step = iter(self), -1
        for _ in range(step - self.step - 1):
            next(self.order)
        self.step = step
        return next(self.order)


def by_length(lengths: Tensor, most: int, *, tokens: bool = False) -> list[list[int]]:
    """Return batches that read every row once, shortest first; the arguments are those of :class:`Drawn`."""
    return list(_cut(torch.arange(len(lengths)), lengths, most, tokens=tokens))


def _cut(rows: Tensor, lengths: Tensor, most: int, *, tokens: bool) -> Iterator[list[int]]:
    """Yield the rows, sorted by their longer side, in batches of at most so many rows or tokens."""
    widths, sums = lengths[rows].amax(1), lengths[rows].sum(1)
    # Rows of equal width are sorted by their other side.
    by_sum = sums.argsort(stable=True)
    ranked = by_sum[widths[by_sum].argsort(stable=True)]
    batch: list[int] = []
    for row, width in zip(rows[ranked].tolist(), widths[ranked].tolist(), strict=True):
        if batch and (len(batch) + 1) * (width if tokens else 1) > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
