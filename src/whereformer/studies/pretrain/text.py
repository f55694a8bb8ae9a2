"""Prepare the text of a pretraining: split it, train or load a tokenizer, and encode, once for all runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.corpus import Text
from ...data.encode import TokenizerChoice, open_or_encode
from ...data.fingerprint import SeenText
from ...data.streams import Stream
from ...data.tokenizers import Vocabulary
from ...lab.training.text import TextFacts, text_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class PretrainingText:
    """The encoded text: its training and held-out streams with tokenizer and facts."""

    training: Stream
    held_out: Stream
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    facts: TextFacts


def prepare_text(
    text: Text, seen: SeenText, choice: TokenizerChoice, cache: Path, scratch: Path | None = None
) -> PretrainingText:
    """Open the text if the cache has it, else encode it; if no tokenizer is given, train one on the training part.

    Args:
        text: the text.
        seen: the same text, as it was read before.
        choice: the tokenizer.
        cache: the folder of encoded texts.
        scratch: the folder to encode into; by default the cache.

    Raises:
        InputError: as :func:`whereformer.data.encode.encode` does.
    """
    encoded = open_or_encode(cache, text, seen, choice, scratch)
    facts = text_facts(text.source, seen.summary, encoded.counts)
    return PretrainingText(encoded.training, encoded.held_out, encoded.tokenizer, encoded.vocabulary, facts)
