"""Facts about the text that a masked language model is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...data.fingerprint import Summary
from ..score import unigram_entropy


@dataclass(frozen=True)
class TextFacts:
    """Where the text comes from, its size, and how well it can be guessed without a model."""

    source: str
    documents: int
    characters: int
    training_tokens: int
    held_out_tokens: int
    vocabulary: int
    """Tokens in the tokenizer's vocabulary."""
    unigram_entropy: float
    """Held-out loss, in nats, of guessing by token frequency."""


def text_facts(source: str, summary: Summary, counts: Tensor) -> TextFacts:
    """Collect facts about a text.

    Args:
        source: where it comes from, for people to read.
        summary: the text in short.
        counts: (2, tokens), how often each token of the vocabulary occurs in the training and the held-out part.
    """
    training, held_out = counts
    sums, entropy = counts.sum(1).tolist(), unigram_entropy(training, held_out)
    return TextFacts(source, summary.documents, summary.characters, sums[0], sums[1], len(training), entropy)
