"""Which rows meet in a batch: those of a like length, for little padding, in an order that chance decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

BUCKET = 32
"""Batches that are sorted by length together: padding is little, and which rows meet stays mostly chance."""


def shuffled(lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> list[list[int]]:
    """Which rows each step reads: every row once before any is read again.

    Shuffled rows are cut into buckets of :data:`BUCKET` batches, each bucket sorted by length, and all its batches come
    in any order.
    """
    order = torch.as_tensor(lengths)

    def epoch(rows: Tensor) -> Iterator[list[int]]:
        for bucket in rows.split(BUCKET * batch_size):
            ranked = bucket[order[bucket].argsort(stable=True)]
            yield from (batch.tolist() for batch in ranked.split(batch_size))

    return list(islice(_in_any_order(epoch, len(order), seed), steps))


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """All rows once, the shortest first."""
    order = torch.as_tensor(lengths).argsort(stable=True)
    return [batch.tolist() for batch in order.split(batch_size)]


def shuffled_by_tokens(lengths: Tensor, batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """As :func:`shuffled` without an end, in batches of a number of tokens, padding included, rather than rows.

    Args:
        lengths: (rows, sides), tokens of each row; no side of a batch has more than ``batch_tokens``.
        batch_tokens: a longer row has a batch of its own.
        seed: decides the order.
    """
    widths = lengths.amax(1)

    def epoch(rows: Tensor) -> Iterator[list[int]]:
        ends = widths[rows].cumsum(0) // (BUCKET * batch_tokens)
        for bucket in rows.split(ends.bincount().tolist()):
            yield from _cut(bucket, lengths, widths, batch_tokens)

    return _in_any_order(epoch, len(lengths), seed)


def by_length_and_tokens(lengths: Tensor, batch_tokens: int) -> list[list[int]]:
    """All rows of (rows, sides) tokens once, the shortest first, in batches of at most this number of tokens."""
    return list(_cut(torch.arange(len(lengths)), lengths, lengths.amax(1), batch_tokens))


def _in_any_order(epoch: Callable[[Tensor], Iterator[list[int]]], rows: int, seed: int) -> Iterator[list[int]]:
    """One epoch after the other, without an end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        batches = list(epoch(torch.randperm(rows, generator=generator)))
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[place]


def _cut(rows: Tensor, lengths: Tensor, widths: Tensor, batch_tokens: int) -> Iterator[list[int]]:
    """The rows by width, in batches of at most this number of tokens."""
    # Among those of a width, by the other side too.
    by_sum = rows[lengths[rows].sum(1).argsort(stable=True)]
    ranked = by_sum[widths[by_sum].argsort(stable=True)]
    batch: list[int] = []
    for row, width in zip(ranked.tolist(), widths[ranked].tolist(), strict=True):
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
