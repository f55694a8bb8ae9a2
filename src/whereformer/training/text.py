"""What is known about text that a masked language model is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .held_out import unigram_entropy


@dataclass(frozen=True)
class TextFacts:
    """The text's size, and how well it can be guessed.

    Args:
        source: where it came from, for people.
        documents, characters: how much there is.
        training_tokens, held_out_tokens: tokens of its two parts.
        vocabulary: tokens that the tokenizer knows.
        unigram_entropy: held-out loss in nats of guessing by frequency alone.
    """

    source: str
    documents: int
    characters: int
    training_tokens: int
    held_out_tokens: int
    vocabulary: int
    unigram_entropy: float


def text_facts(
    source: str,
    documents: Sequence[str],
    parts: tuple[Sequence[str], Sequence[str]],
    streams: tuple[Tensor, Tensor],
    vocab_size: int,
) -> TextFacts:
    """Facts about prepared text.

    Args:
        source: where it came from, for people.
        documents: the whole text.
        parts: pieces to train on and pieces held out.
        streams: the tokens of both, (tokens,) each.
        vocab_size: tokens that the tokenizer knows.
    """
    training, held_out = streams
    return TextFacts(
        source=source,
        documents=len(documents),
        characters=sum(len(piece) for part in parts for piece in part),
        training_tokens=len(training),
        held_out_tokens=len(held_out),
        vocabulary=vocab_size,
        unigram_entropy=unigram_entropy(training, held_out, vocab_size),
    )
