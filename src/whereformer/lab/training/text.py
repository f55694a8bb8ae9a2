"""Facts about the text that a masked language model is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...data.fingerprint import Summary
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


def text_facts(source: str, summary: Summary, counts: Tensor) -> TextFacts:
    """Collect facts about prepared text.

    Args:
        source: where it comes from, for people to read.
        summary: the text in short.
        counts: (2, tokens), how often each token of the vocabulary occurs in the training and the held-out part.
    """
    training, held_out = counts
    return TextFacts(
        source=source,
        documents=summary.documents,
        characters=summary.characters,
        training_tokens=int(training.sum()),
        held_out_tokens=int(held_out.sum()),
        vocabulary=len(training),
        unigram_entropy=unigram_entropy(training, held_out),
    )
