"""The text of a pretraining: split, with a tokenizer that is loaded or trained, and encoded, once for all runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...data.corpus import Text
from ...data.encode import EncodedText, TokenizerChoice, open_or_encode
from ...lab.training.text import TextFacts, text_facts


@dataclass(frozen=True)
class PretrainingText(EncodedText):
    """An encoded text with facts about it."""

    facts: TextFacts


def prepare_text(text: Text, choice: TokenizerChoice, cache: Path, scratch: Path | None = None) -> PretrainingText:
    """Open the text if the cache has it, else encode it; see :func:`whereformer.data.encode.open_or_encode`."""
    encoded = open_or_encode(cache, text, choice, scratch)
    return PretrainingText(**vars(encoded), facts=text_facts(text.source, encoded))
