"""Encode a text once, into files beside the run, and find them again.

A cache has a folder for each text and tokenizer, with ``training.ids`` and ``held_out.ids``, the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .corpus import Pages, Text, check_enough, fingerprint, is_held_out
from .seen import SeenText, check_unchanged, remember
from .shards import Entry, Index, Lots
from .streams import Appended, TokenFile, packed, width_of
from .tokenizers import Vocabulary, fit_tokenizer, load_tokenizer, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARD = 4096
"""Number of pages in a shard: about 16 MB of text, a few seconds of work."""
LOT = 128
"""Number of pages that are encoded at a time, by all processors. Encoded pages take a hundred bytes per token."""
STREAMS = ("training.ids", "held_out.ids")


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer to load from ``path``, or, if that is None, one to train with ``vocab_size`` tokens."""

    path: Path | None
    vocab_size: int

    @cached_property
    def setting(self) -> str:
        """The entry for the tokenizer in a run's settings.

        Raises:
            InputError: if there is no tokenizer at ``path``.
        """
        if self.path is None:
            return f"trained, {self.vocab_size} tokens"
        backend = load_tokenizer(self.path).backend_tokenizer
        # The JSON does not tell whether names of special tokens in text are plain text.
        return fingerprint([backend.to_str(), *(["plain text"] if backend.encode_special_tokens else [])])


@dataclass(frozen=True)
class EncodedText:
    """A text in a cache.

    Args:
        training, held_out: the streams.
        counts: (2, tokens) int64, how often each token occurs in each stream.
        tokenizer: its tokenizer.
        vocabulary: the tokenizer's special and ordinary ids.
    """

    training: TokenFile
    held_out: TokenFile
    counts: Tensor
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary


def open_or_encode(
    cache: Path, text: Text, seen: SeenText, choice: TokenizerChoice, scratch: Path | None = None
) -> EncodedText:
    """Open an encoded text if the cache has it, else encode it there, or in the folder ``scratch`` if there is one.

    Raises:
        InputError: as :func:`encode` does.
    """
    found = open_encoded(cache, seen, choice)
    if found is None:
        found = encode(_entry(cache, seen, choice).within(scratch), text, seen, choice)
    if scratch is None:
        remember(text, seen, cache)
    return found


def open_encoded(cache: Path, seen: SeenText, choice: TokenizerChoice) -> EncodedText | None:
    """Open an encoded text if the cache has all of it, undamaged, else return None. Every byte is checked."""
    entry = _entry(cache, seen, choice)
    index = entry.complete()
    return None if index is None else _opened(entry, index, choice)


def encode(entry: Entry, text: Text, seen: SeenText, choice: TokenizerChoice) -> EncodedText:
    """Encode a text, or the part of it that is missing in its folder, and open it.

    Only one process may do this at a time. The others may call :func:`open_encoded` afterwards.

    Args:
        entry: the text's folder.
        text: the text; its progress is told what happens.
        seen: the same text, as it was read before.
        choice: the tokenizer.

    Raises:
        InputError: if the text is too short or changes meanwhile, the tokenizer does not suit, the folder can't be
            written, or another process is writing to it.
    """
    check_enough(text.pages(), seen.summary.characters)
    # Learning a vocabulary reads the text twice more.
    text.progress.start(seen.summary.characters * (1 if choice.path else 3))
    with entry.locked():

        def learn() -> str:
            return fit_tokenizer(Pages(text, held_out=False), choice.vocab_size).backend_tokenizer.to_str()

        index = entry.begin(text.progress, None if choice.path else learn)
        tokenizer, vocabulary = _tokenizer(entry, choice)
        width = width_of(vocabulary.size)
        text.progress.begin("encoding the text")

        def write(first: int, pages: list[str], files: list[Appended]) -> None:
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(pages, add_special_tokens=False)
            for number, page in enumerate(encoded, first):
                files[is_held_out(number)].write(packed((*page.ids, vocabulary.sep), width))

        index = entry.extend(index, text.pages(), Lots(LOT, SHARD), write)
        check_unchanged(text, seen, entry)
        streams = zip(STREAMS, _streams(entry, index, vocabulary), strict=True)
        index = entry.finish(index, {name: stream.counts(vocabulary.size).tolist() for name, stream in streams})
    return _opened(entry, index, choice)


def _entry(cache: Path, seen: SeenText, choice: TokenizerChoice) -> Entry:
    return Entry(cache / f"ids-{fingerprint([seen.summary.fingerprint, choice.setting])}", STREAMS)


def _tokenizer(entry: Entry, choice: TokenizerChoice) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    tokenizer = load_tokenizer(choice.path or entry.tokenizer)
    return tokenizer, vocabulary_of(tokenizer, "tokenizer" if choice.path else "data")


def _streams(entry: Entry, index: Index, vocabulary: Vocabulary) -> list[TokenFile]:
    width = width_of(vocabulary.size)
    return [TokenFile(entry.folder / name, width, index.size(place) // width) for place, name in enumerate(STREAMS)]


def _opened(entry: Entry, index: Index, choice: TokenizerChoice) -> EncodedText:
    tokenizer, vocabulary = _tokenizer(entry, choice)
    training, held_out = _streams(entry, index, vocabulary)
    assert index.facts is not None
    counts = torch.tensor([index.facts[name] for name in STREAMS])
    return EncodedText(training, held_out, counts, tokenizer, vocabulary)
