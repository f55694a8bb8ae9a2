"""Facts about the text that a masked language model is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .held_out import unigram_entropy


@dataclass(frozen=True)
class TextFacts:
    """The size of the text, and how well it can be guessed without a model.

    Args:
        source: where it comes from, for people to read.
        documents, characters: the number of each.
        training_tokens, held_out_tokens: tokens in each part.
        vocabulary: tokens in the tokenizer's vocabulary.
        unigram_entropy: held-out loss, in nats, of guessing by token frequency.
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
    """Collect facts about prepared text.

    Args:
        source: where it comes from, for people to read.
        documents: the whole text.
        parts: the training pieces and the held-out pieces.
        streams: the tokens of both parts, (tokens,) each.
        vocab_size: tokens in the tokenizer's vocabulary.
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
