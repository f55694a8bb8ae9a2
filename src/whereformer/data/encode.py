"""Encode a text once, into files next to the run, and find them again.

A cache has a folder for each encoded text, with its streams, or with the pairs of a parallel text. The folder is
written as ``NAME.partial`` and gets its name when it is complete. Its manifest shows damage. The name has the version
of this package, so that commands of two versions can share a cache without replacing each other's files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import manifest, ranks
from ..errors import InputError
from ..files import new_folder
from ..provenance import this_version
from .corpus import HELD_OUT_EVERY, PAGE_LENGTH, TextSource, is_held_out
from .streams import TokenFile, iter_chunks, to_bytes
from .tokenizers import Vocabulary, check_predictable, fit_tokenizer, load_tokenizer, read_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 128
"""The number of pages that are encoded at a time, by all processors. Encoded pages take a hundred bytes per token."""
STREAMS = ("training.ids", "held_out.ids")

Facts = dict[str, Any]
"""Numbers about the content of a folder, by name."""


def get_or_build(
    cache: Path,
    kind: str,
    key: Sequence[str],
    fill: Callable[[Path], Facts],
    log: Callable[[str], object],
    facts: object = dict,
) -> tuple[Path, Facts]:
    """Return an encoded text's folder, and facts about it. The folder is filled first if it is missing or damaged.

    If a run has several processes, they share the folder, and only the main one fills it.

    Args:
        cache: the folder of all such folders.
        kind, key: the beginning of the folder's name, and the texts that decide its content.
        fill: writes all files into an empty folder, and returns the facts.
        log: called with a line about each step.
        facts: the type of the facts, see :func:`whereformer.manifest.matches_type`.

    Raises:
        InputError: if another command is writing to the cache; and the errors of ``fill``.
    """
    folder = cache / f"{kind}-{manifest.fingerprint(key)}-{this_version()}"

    def find_problem() -> str | None:
        problem = manifest.find_problem(folder)
        if problem is None and not manifest.matches_type(facts, manifest.read(folder)):
            return f"its {manifest.NAME} has something else"
        return problem

    if (problem := find_problem()) is not None:
        if folder.exists():
            log(f"{folder} is damaged ({problem}); encoding it again")
        if not ranks.is_main():
            problem = f"{cache} lacks files that the main process wrote"
            raise InputError("cache", f"{problem}; all machines must share this folder")
        with ranks.open_folder(cache, "cache"):
            # Another command may have filled it meanwhile.
            if find_problem() is not None:
                with new_folder(folder) as partial:
                    manifest.write(partial, fill(partial))
    return folder, manifest.read(folder)


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer to load from ``path``, or, if that is None, one to train with ``vocab_size`` tokens."""

    path: Path | None
    vocab_size: int

    @cached_property
    def setting(self) -> str:
        """The entry for the tokenizer in a run's settings; an InputError if ``path`` has no tokenizer."""
        if self.path is None:
            return f"trained, {self.vocab_size} tokens"
        backend = load_tokenizer(self.path).backend_tokenizer
        # The JSON does not say whether names of special tokens in text are plain text.
        return manifest.fingerprint([backend.to_str(), *(["plain text"] if backend.encode_special_tokens else [])])


@dataclass(frozen=True)
class EncodedText:
    """A text in a cache: its streams, its tokenizer, and the ids of special and ordinary tokens.

    ``guessing`` is the held-out loss, in nats, of guessing by token frequency.
    """

    training: TokenFile
    held_out: TokenFile
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    guessing: float


@dataclass(frozen=True)
class _TextFacts:
    """The facts of an encoded text, see :class:`EncodedText`."""

    guessing: float


def unigram_entropy(training: Tensor, held_out: Tensor) -> float:
    """Return the held-out loss, in nats, of guessing by token frequency, which is the best that ignores context.

    The arguments are (tokens,), how often each token of the vocabulary occurs in these parts of the text.
    """
    counts = training.double() + 1.0
    return float(-((counts / counts.sum()).log() * held_out).sum() / held_out.sum())


def open_or_encode(
    cache: Path, text: TextSource, choice: TokenizerChoice, log: Callable[[str], object] = lambda line: None
) -> EncodedText:
    """Open an encoded text if the cache has it, else encode it there.

    Args:
        cache, log: as in :func:`get_or_build`.
        text: the text.
        choice: the tokenizer. One that is trained learns from the training part.

    Raises:
        InputError: if the text is too short or changes meanwhile, the tokenizer does not suit or knows too little of
            it, or another process is writing to the cache.
    """

    def open_tokenizer(folder: Path) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
        tokenizer = load_tokenizer(choice.path or folder)
        return tokenizer, read_vocabulary(tokenizer, "tokenizer" if choice.path else "data")

    def fill(folder: Path) -> Facts:
        if choice.path is None:
            log("learning the vocabulary")
            fit_tokenizer(text, choice.vocab_size).save_pretrained(folder)
        tokenizer, vocabulary = open_tokenizer(folder)
        log("encoding the text")
        number, pages = 0, [0, 0]
        with (folder / STREAMS[0]).open("wb") as training, (folder / STREAMS[1]).open("wb") as held_out:
            for chunk in iter_chunks(text.pages(), CHUNK):
                for page in tokenizer.backend_tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                    stream = held_out if is_held_out(number) else training
                    stream.write(to_bytes((*page.ids, vocabulary.sep)))
                    pages[is_held_out(number)] += 1
                    number += 1
        if text.compute_hash() != text.fingerprint:
            raise InputError("data", "the text changed while it was read; run the same command again")
        if number <= HELD_OUT_EVERY // 2:
            expected = f"expected more than {PAGE_LENGTH * HELD_OUT_EVERY // 2:,} characters"
            characters = sum(map(len, text.pages()))
            raise InputError("data", f"too little text to hold some out: {expected}, got {characters:,}")
        counts = [TokenFile(folder / name).count_ids(vocabulary.size) for name in STREAMS]
        for part, count, separators in zip(("training", "held-out"), counts, pages, strict=True):
            words = count.clone()
            words[vocabulary.sep] -= separators  # separators end pages and do not belong to the text
            check_predictable(tokenizer, words, f"the {part} text")
        return {"guessing": unigram_entropy(*counts)}

    folder, facts = get_or_build(cache, "ids", [text.fingerprint, choice.setting], fill, log, _TextFacts)
    tokenizer, vocabulary = open_tokenizer(folder)
    training, held_out = (TokenFile(folder / name) for name in STREAMS)
    return EncodedText(training, held_out, tokenizer, vocabulary, **facts)
