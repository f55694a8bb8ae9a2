"""Group rows of similar length into batches, in random order, so that batches need little padding."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

BUCKET = 32
"""Number of batches that are sorted by length together: enough for little padding, yet batches stay mostly random."""


def shuffled(lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> list[list[int]]:
    """Return the rows that each step reads. Every row is read once before any is read again.

    The rows are shuffled and cut into buckets of :data:`BUCKET` batches. Each bucket is sorted by length and cut into
    batches, and all batches are then shuffled.
    """
    order = torch.as_tensor(lengths)

    def epoch(rows: Tensor) -> Iterator[list[int]]:
        for bucket in rows.split(BUCKET * batch_size):
            ranked = bucket[order[bucket].argsort(stable=True)]
            yield from (batch.tolist() for batch in ranked.split(batch_size))

    return list(islice(_in_any_order(epoch, len(order), seed), steps))


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches that read every row once, shortest first."""
    order = torch.as_tensor(lengths).argsort(stable=True)
    return [batch.tolist() for batch in order.split(batch_size)]


def shuffled_by_tokens(lengths: Tensor, batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Like :func:`shuffled`, but endless, and with batches limited by tokens (padding included) instead of rows.

    Args:
        lengths: (rows, sides), the tokens of each row; no side of a batch has more than ``batch_tokens``.
        batch_tokens: the most tokens of a batch; a longer row gets a batch of its own.
        seed: seed of the order.
    """
    widths = lengths.amax(1)

    def epoch(rows: Tensor) -> Iterator[list[int]]:
        ends = widths[rows].cumsum(0) // (BUCKET * batch_tokens)
        for bucket in rows.split(ends.bincount().tolist()):
            yield from _cut(bucket, lengths, batch_tokens)

    return _in_any_order(epoch, len(lengths), seed)


class Drawn:
    """The rows of each step: those of an endless random order, cut by tokens.

    Args:
        lengths: (rows, 2), the tokens of each row's source and target.
        tokens: the most tokens of a step on either side, including padding.
        seed: seed of the order.
    """

    def __init__(self, lengths: Tensor, tokens: int, seed: int) -> None:
        self.given = lengths, tokens, seed
        self.order: Iterator[list[int]] = iter(())
        self.step = -1  # the last one

    @property
    def per_epoch(self) -> int:
        """The steps that read the whole text once; epochs have about the same number."""
        count, left = 0, len(self.given[0])
        for rows in shuffled_by_tokens(*self.given):
            count, left = count + 1, left - len(rows)
            if not left:
                break
        return count

    def __call__(self, step: int) -> list[int]:
        """Return the rows of a step from 0 on. The step after the last one is found at once."""
        if self.step < 0 or step <= self.step:
            self.order, self.step = shuffled_by_tokens(*self.given), -1
        for _ in range(step - self.step - 1):
            next(self.order)
        self.step = step
        return next(self.order)


def by_length_and_tokens(lengths: Tensor, batch_tokens: int) -> list[list[int]]:
    """Return batches that read every row once, shortest first, limited as in :func:`shuffled_by_tokens`."""
    return list(_cut(torch.arange(len(lengths)), lengths, batch_tokens))


def _in_any_order(epoch: Callable[[Tensor], Iterable[list[int]]], rows: int, seed: int) -> Iterator[list[int]]:
    """Yield the batches of one epoch after another, forever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        # Arrays take a ninth of the memory of lists.
        batches = [array("i", batch) for batch in epoch(torch.randperm(rows, generator=generator))]
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[place].tolist()


def _cut(rows: Tensor, lengths: Tensor, batch_tokens: int) -> Iterator[list[int]]:
    """Yield the rows, sorted by their longer side, in batches of at most ``batch_tokens``."""
    widths, sums = lengths[rows].amax(1), lengths[rows].sum(1)
    # Rows of equal width are sorted by their other side.
    by_sum = sums.argsort(stable=True)
    ranked = by_sum[widths[by_sum].argsort(stable=True)]
    batch: list[int] = []
    for row, width in zip(rows[ranked].tolist(), widths[ranked].tolist(), strict=True):
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
