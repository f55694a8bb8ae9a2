"""Encode a text once, into files beside the run, and find them again.

A cache has a folder for each thing that was encoded: the streams of a text, or the pairs of a parallel one.
It is written as ``NAME.partial`` and gets its name when all of it is there. Its manifest tells damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..files import new_folder, write_atomically
from ..lab import manifest, ranks
from ..lab.fingerprint import fingerprint
from ..lab.folder import open_folder
from ..lab.progress import Progress
from .corpus import Pages, Text, check_enough, is_held_out, pages_of
from .streams import TokenFile, in_lots, open_stream, packed, width_of
from .tokenizers import Vocabulary, fit_tokenizer, load_tokenizer, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = "4"
"""Format version of a folder. Another version's is left as it is."""
LOT = 128
"""Number of pages that are encoded at a time, by all processors. Encoded pages take a hundred bytes per token."""
STREAMS = ("training.ids", "held_out.ids")

Encoded = TypeVar("Encoded")
Facts = dict[str, Any]
"""Numbers about what a folder holds, by name."""


def cached(
    cache: Path,
    kind: str,
    key: Sequence[str],
    fill: Callable[[Path], Facts],
    open_filled: Callable[[Path, Facts], Encoded],
    progress: Progress,
) -> Encoded:
    """Open a folder with what was encoded. It is filled if it is missing or damaged.

    Of several processes of a run, only the main one fills a folder that they share.

    Args:
        cache: the folder of all such folders.
        kind: the beginning of the folder's name.
        key: what decides what it holds.
        fill: writes all files into an empty folder, and returns numbers about it.
        open_filled: opens a folder with these numbers.
        progress: is told what happens.

    Raises:
        InputError: if another command is writing to the cache; and what ``fill`` raises.
    """
    folder = cache / f"{kind}-{fingerprint([FORMAT, *key])}"
    if (problem := manifest.problem(folder)) is not None:
        if folder.exists():
            progress.line(f"{folder} is damaged ({problem}); encoding it again")
        if not ranks.is_main():
            raise InputError(
                "cache", f"{cache} lacks what the main process has written to it; all machines have to share it"
            )
        with open_folder(cache, "cache"):
            # Another command may have filled it meanwhile.
            if manifest.problem(folder) is not None:
                with new_folder(folder) as partial:
                    manifest.write(partial, fill(partial))
    return open_filled(folder, manifest.facts(folder))


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

    def check(self) -> None:
        """Raise :class:`InputError` if there is no tokenizer at ``path``; for the time before a long text is read."""
        _ = self.setting


@dataclass(frozen=True)
class TextFacts:
    """Where a text comes from, its size, and how well it can be guessed without a model."""

    source: str
    documents: int
    characters: int
    training_tokens: int
    held_out_tokens: int
    vocabulary: int
    """Tokens in the tokenizer's vocabulary."""
    unigram_entropy: float
    """Held-out loss, in nats, of guessing by token frequency."""


@dataclass(frozen=True)
class EncodedText:
    """A text in a cache.

    Args:
        source: where it comes from, for people to read.
        training, held_out: the streams.
        documents, characters: the number of documents and of characters in both.
        counts: (2, tokens) int64, how often each token occurs in each stream.
        tokenizer: its tokenizer.
        vocabulary: the tokenizer's special and ordinary ids.
    """

    source: str
    training: TokenFile
    held_out: TokenFile
    documents: int
    characters: int
    counts: Tensor
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary

    @cached_property
    def facts(self) -> TextFacts:
        """Facts about it."""
        sizes = len(self.training), len(self.held_out), self.vocabulary.size
        return TextFacts(self.source, self.documents, self.characters, *sizes, unigram_entropy(*self.counts))


def unigram_entropy(training: Tensor, held_out: Tensor) -> float:
    """Return the held-out loss, in nats, of guessing by token frequency: what a model without context can reach.

    Args:
        training, held_out: (tokens,), how often each token of the vocabulary occurs in these parts of the text.
    """
    counts = training.double() + 1.0
    return float(-((counts / counts.sum()).log() * held_out).sum() / held_out.sum())


def open_or_encode(cache: Path, text: Text, choice: TokenizerChoice) -> EncodedText:
    """Open an encoded text if the cache has it, else encode it there.

    Args:
        cache: the folder of all encoded texts.
        text: the text; its progress is told what happens.
        choice: the tokenizer. One that is trained learns from the training part.

    Raises:
        InputError: if the text is too short or changes meanwhile, the tokenizer does not suit, or another process is
            writing to the cache.
    """

    def opened(folder: Path) -> tuple[PreTrainedTokenizerFast, Vocabulary, list[Path]]:
        tokenizer = load_tokenizer(choice.path or folder / "tokenizer.json")
        vocabulary = vocabulary_of(tokenizer, "tokenizer" if choice.path else "data")
        return tokenizer, vocabulary, [folder / name for name in STREAMS]

    def fill(folder: Path) -> Facts:
        check_enough(text.pages())
        # Learning a vocabulary reads the text twice more.
        text.progress.start(text.size * (1 if choice.path else 3))
        if choice.path is None:
            text.progress.begin("learning the vocabulary")
            learned = fit_tokenizer(Pages(text, held_out=False), choice.vocab_size)
            write_atomically(folder / "tokenizer.json", learned.backend_tokenizer.to_str())
        tokenizer, vocabulary, files = opened(folder)
        width, found = width_of(vocabulary.size), {"documents": 0, "characters": 0}
        text.progress.begin("encoding the text")

        def pages() -> Iterator[str]:
            for document in text.documents():
                found["documents"] += 1
                for page in pages_of(document):
                    found["characters"] += len(page)
                    yield page

        with files[0].open("wb") as training, files[1].open("wb") as held_out:
            number = 0
            for lot in in_lots(pages(), LOT):
                for page in tokenizer.backend_tokenizer.encode_batch_fast(lot, add_special_tokens=False):
                    stream = held_out if is_held_out(number) else training
                    stream.write(packed((*page.ids, vocabulary.sep), width))
                    number += 1
        if text.hashed() != text.fingerprint:
            raise InputError("data", "the text changed while it was read; run the same command again")
        return found

    def open_filled(folder: Path, facts: Facts) -> EncodedText:
        tokenizer, vocabulary, files = opened(folder)
        training, held_out = (open_stream(file, width_of(vocabulary.size)) for file in files)
        counts = torch.stack([stream.counts(vocabulary.size) for stream in (training, held_out)])
        return EncodedText(
            text.source, training, held_out, **facts, counts=counts, tokenizer=tokenizer, vocabulary=vocabulary
        )

    return cached(cache, "ids", [text.fingerprint, choice.setting], fill, open_filled, text.progress)
