"""Prepare the text of a pretraining: split it, train or load a tokenizer, and encode, once for all runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.cache import EncodedText, TokenizerChoice, encode, open_encoded
from ...data.corpus import Text
from ...data.seen import SeenText
from ...data.streams import Stream
from ...data.tokenizers import Vocabulary
from ...training.text import TextFacts, text_facts

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
    """Open the text if the cache has it, else encode it there, or in the folder ``scratch`` if there is one."""
    return open_text(cache, text, seen, choice) or encode_text(scratch or cache, text, seen, choice)


def open_text(cache: Path, text: Text, seen: SeenText, choice: TokenizerChoice) -> PretrainingText | None:
    """Open a text that has been encoded; None if it has not, or not all of it, or if the cache is damaged."""
    encoded = open_encoded(cache, seen, choice)
    return None if encoded is None else _with_facts(encoded, text, seen)


def encode_text(cache: Path, text: Text, seen: SeenText, choice: TokenizerChoice) -> PretrainingText:
    """Encode the text into the cache. If no tokenizer is given, train one on the training part.

    Raises:
        InputError: as :func:`whereformer.data.cache.encode` does.
    """
    # Learning a vocabulary reads the text twice more.
    text.progress.start(seen.summary.characters * (1 if choice.path else 3))
    return _with_facts(encode(cache, text, seen, choice), text, seen)


def _with_facts(encoded: EncodedText, text: Text, seen: SeenText) -> PretrainingText:
    facts = text_facts(text.source, seen.summary, encoded.counts)
    return PretrainingText(encoded.training, encoded.held_out, encoded.tokenizer, encoded.vocabulary, facts)
