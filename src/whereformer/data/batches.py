"""Group rows of similar length into batches, in random order, so that batches need little padding."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch
from torch import Tensor

BUCKET_BATCHES = 32
"""Number of batches that are sorted by length together: enough for little padding, yet batches stay mostly random."""


class RandomBatches:
    """The batches of a training, one for each step, in an endless random order.

    Every row is read once before any is read again. In each such epoch, the rows are shuffled and cut into buckets of
    about :data:`BUCKET_BATCHES` batches. Each bucket is sorted by length and cut into batches, and then all batches are
    shuffled.

    Args:
        lengths: (rows, sides), the number of tokens on each side of a row, such as its source and its target.
        max_size: the largest number of rows in a batch.
        seed: seed of the order.
        tokens: whether ``max_size`` counts tokens on each side instead, padding included. A longer row gets its own
            batch.
    """

    def __init__(self, lengths: Tensor, max_size: int, seed: int, *, tokens: bool = False) -> None:
        self.lengths, self.max_size, self.seed, self.tokens = lengths, max_size, seed, tokens
        self.order: Iterator[list[int]] = iter(())
        self.step = -1  # the last one

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of each step, forever."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = self.lengths.amax(1) if self.tokens else torch.ones(len(self.lengths), dtype=torch.long)
        while True:
            rows = torch.randperm(len(self.lengths), generator=generator)
            buckets = (sizes[rows].cumsum(0) - 1) // (BUCKET_BATCHES * self.max_size)
            # Arrays take a ninth of the memory of lists.
            batches = [
                array("i", batch)
                for bucket in rows.split(buckets.bincount().tolist())
                for batch in _cut(bucket, self.lengths, self.max_size, tokens=self.tokens)
            ]
            for index in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[index].tolist()

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
        """Return the rows of a step, counted from 0. The step after the last one that was asked for takes no time."""
        if self.step < 0 or step <= self.step:
            self.order, self.step = iter(self), -1
        for _ in range(step - self.step - 1):
            next(self.order)
        self.step = step
        return next(self.order)


def by_length(lengths: Tensor, max_size: int, *, tokens: bool = False) -> list[list[int]]:
    """Return batches that read every row once, shortest first, with the arguments of :class:`RandomBatches`."""
    return list(_cut(torch.arange(len(lengths)), lengths, max_size, tokens=tokens))


def _cut(rows: Tensor, lengths: Tensor, max_size: int, *, tokens: bool) -> Iterator[list[int]]:
    """Yield the rows, sorted by their longer side, in batches of at most ``max_size`` rows or tokens."""
    widths, sums = lengths[rows].amax(1), lengths[rows].sum(1)
    # Rows of equal width are sorted by their other side.
    by_sum = sums.argsort(stable=True)
    ranked = by_sum[widths[by_sum].argsort(stable=True)]
    batch: list[int] = []
    for row, width in zip(rows[ranked].tolist(), widths[ranked].tolist(), strict=True):
        if batch and (len(batch) + 1) * (width if tokens else 1) > max_size:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
