"""Masked and causal language modeling on a stream of text: BERT's masking, training batches, held-out windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .streams import Stream
from .tokenizers import CLS, PAD, Vocabulary, trained_vocabulary

IGNORED = -100
"""The label of tokens that are not predicted."""

HELD_OUT_RATE = 0.15
"""Share of held-out tokens that are masked, whatever rate training uses."""


def mask_tokens(
    tokens: Tensor, rate: float, vocabulary: Vocabulary, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mask tokens as BERT does: of the chosen tokens, 80% become [MASK], 10% a random token, and 10% stay.

    Args:
        tokens: (batch, n) ids; special tokens are never chosen.
        rate: share of each row that is chosen; at least one token is.
        vocabulary: says which ids are special.
        generator: the source of all randomness.

    Returns:
        input ids and labels, (batch, n) each; labels are -100 where nothing is predicted.
    """
    noise = torch.rand(tokens.shape, generator=generator)
    ordinary = vocabulary.is_ordinary[tokens]
    count = max(1, round(rate * tokens.shape[1]))
    chosen = torch.zeros_like(ordinary).scatter_(1, (noise * ordinary).topk(count, -1).indices, True) & ordinary
    fate = torch.rand(tokens.shape, generator=generator)
    drawn = torch.randint(len(vocabulary.ordinary), tokens.shape, generator=generator)
    random_tokens = vocabulary.ordinary[drawn]
    masked = torch.where(fate < 0.8, vocabulary.mask, torch.where(fate < 0.9, random_tokens, tokens))
    return torch.where(chosen, masked, tokens), torch.where(chosen, tokens, IGNORED)


@dataclass(frozen=True)
class Batches:
    """Training batches cut from random places in a stream. Only the seed and the step decide which places.

    Args:
        stream: the ids to cut from.
        batch_size: rows per batch.
        length: tokens per row; the first is [CLS].
        rate: share of masked tokens; None masks none, and every token is a label, as causal models take them.
        vocab_size: tokens in the trained vocabulary.
        seed: seed of places and masks.
    """

    stream: Stream
    batch_size: int
    length: int
    rate: float | None
    vocab_size: int
    seed: int

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the input ids and labels of one step, (batch_size, length) each."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        body = self.length - 1
        starts = torch.randint(len(self.stream) - body + 1, (self.batch_size, 1), generator=generator)
        tokens = torch.stack([self.stream[start : start + body] for start in starts.flatten().tolist()])
        tokens = torch.cat((torch.full_like(starts, CLS), tokens), 1)
        if self.rate is None:
            return tokens, tokens
        return mask_tokens(tokens, self.rate, trained_vocabulary(self.vocab_size), generator)


class HeldOut:
    """Held-out text with one fixed set of masks, so that every method and length predicts the same tokens.

    Args:
        stream: the ids; all of them are kept in memory.
        rate: share of masked tokens; None masks none, and every token is a label, as causal models take them.
        vocab_size: tokens in the trained vocabulary.
    """

    GROUP = 64
    """Masks are spread evenly: the rate holds within every group of this number of tokens."""

    def __init__(self, stream: Stream, rate: float | None, vocab_size: int) -> None:
        tokens = stream[: len(stream) // self.GROUP * self.GROUP]
        if rate is None:
            self.inputs = self.labels = tokens
            return
        generator = torch.Generator().manual_seed(0)
        inputs, labels = mask_tokens(tokens.view(-1, self.GROUP), rate, trained_vocabulary(vocab_size), generator)
        self.inputs, self.labels = inputs.flatten(), labels.flatten()

    def windows(self, length: int, tokens_per_batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield batches of windows, each [CLS] and ``length - 1`` tokens of text.

        Yields:
            input ids, labels and attention mask, (rows, length) each; at most ``tokens_per_batch`` tokens a batch,
            but at least one row.
        """
        body = length - 1
        missing = -len(self.inputs) % body
        inputs = functional.pad(self.inputs, (0, missing), value=PAD).view(-1, body)
        labels = functional.pad(self.labels, (0, missing), value=IGNORED).view(-1, body)
        inputs = functional.pad(inputs, (1, 0), value=CLS)
        labels = functional.pad(labels, (1, 0), value=IGNORED)
        for rows in torch.arange(len(inputs)).split(max(1, tokens_per_batch // length)):
            yield inputs[rows], labels[rows], inputs[rows] != PAD
