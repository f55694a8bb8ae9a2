"""Facts about the text that a masked language model is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from ...data.encode import EncodedText
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


def text_facts(source: str, text: EncodedText) -> TextFacts:
    """Collect facts about a text; ``source`` says where it comes from, for people to read."""
    return TextFacts(
        source,
        text.documents,
        text.characters,
        len(text.training),
        len(text.held_out),
        text.vocabulary.size,
        unigram_entropy(*text.counts),
    )
