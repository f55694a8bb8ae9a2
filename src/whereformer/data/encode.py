"""Encode a text once, into files beside the run, and find them again.

A cache has a folder for each thing that was encoded: the streams of a text, the pairs of a parallel one, labeled rows.
It is written as ``NAME.partial`` and gets its name when all of it is there. ``contents.json`` in it tells damage.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..files import make_folder, move_folder, naming, write_atomically
from ..lab import ranks
from ..lab.folder import open_folder
from ..lab.json_files import check_seal, from_json, read_json, sealed, write_json
from ..lab.progress import Progress
from .corpus import Pages, Text, check_enough, is_held_out
from .fingerprint import SeenText, check_unchanged, fingerprint, remember
from .streams import TokenFile, in_lots, open_stream, packed, width_of
from .tokenizers import Vocabulary, fit_tokenizer, load_tokenizer, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = "3"
"""Format version of a folder. Another version's is left as it is."""
CONTENTS = "contents.json"
LOT = 128
"""Number of pages that are encoded at a time, by all processors. Encoded pages take a hundred bytes per token."""
STREAMS = ("training.ids", "held_out.ids")

Encoded = TypeVar("Encoded")
Facts = dict[str, list[int]]
"""Numbers about what a folder holds."""


@dataclass(frozen=True)
class Contents:
    """What a folder of a cache holds: the SHA-256 of each file, and numbers about all of it."""

    files: dict[str, str]
    facts: Facts


@dataclass(frozen=True)
class Cache:
    """A folder of encoded texts."""

    folder: Path
    scratch: Path | None = None
    """A folder of this process alone to encode into, if the cache is not to change."""
    progress: Progress = field(default_factory=Progress)

    def entry(
        self,
        kind: str,
        key: Sequence[str],
        fill: Callable[[Path], Facts],
        open_filled: Callable[[Path, Facts], Encoded],
    ) -> Encoded:
        """Open a folder with what was encoded. It is filled if it is missing or damaged, or cannot be opened.

        Of several processes of a run, only the main one fills a folder that they share.

        Args:
            kind: the beginning of the folder's name.
            key: what decides what it holds.
            fill: writes all files into an empty folder, and returns numbers about it.
            open_filled: opens a folder with these numbers; it raises a ValueError if they do not fit the files.

        Raises:
            InputError: if it can't be written, or another command is writing to it; and what ``fill`` raises.
        """
        folder = self.folder / f"{kind}-{fingerprint([FORMAT, *key])}"
        found = self._opened(folder, open_filled)
        if found is None:
            folder = folder if self.scratch is None else self.scratch / folder.name
            found = self._filled(folder, fill, open_filled)
        return found

    def _opened(self, folder: Path, open_filled: Callable[[Path, Facts], Encoded]) -> Encoded | None:
        """Open the folder if it is there and undamaged, else return None. Every byte is checked."""
        if not folder.exists():
            return None
        try:
            content = read_json(folder / CONTENTS)
            check_seal(content)
            found = from_json(Contents, content)
            for name, expected in found.files.items():
                if _hash(folder / name) != expected:
                    raise ValueError(f"{name} is not what was written")
            return open_filled(folder, found.facts)
        except (OSError, ValueError) as error:
            self.progress.line(f"{folder} is damaged ({error}); encoding it again")
            return None

    def _filled(
        self, folder: Path, fill: Callable[[Path], Facts], open_filled: Callable[[Path, Facts], Encoded]
    ) -> Encoded:
        partial = folder.with_name(f"{folder.name}.partial")
        with self._locked(partial) as lock:
            try:
                # Another command may have filled it while this one waited for its text.
                found = self._opened(folder, open_filled)
                if found is not None:
                    return found
                for left in partial.iterdir():  # by a command that was killed
                    if left.name != ".lock":
                        left.unlink()
                with naming(partial):
                    facts = fill(partial)
                    hashes = {file.name: _hash(file) for file in sorted(partial.iterdir()) if file.name != ".lock"}
                    write_json(partial / CONTENTS, sealed({"files": hashes, "facts": facts}))
                    if os.name == "nt":
                        lock.close()  # or the folder could not be moved; there, it locks nothing
                    move_folder(partial, folder)
            except OSError as error:
                raise InputError("cache", f"cannot write {partial}: {error.strerror or error}") from None
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return open_filled(folder, facts)

    def _locked(self, folder: Path) -> AbstractContextManager[Any]:
        """Create a folder, and keep other commands from writing to it."""
        if self.scratch is not None:
            make_folder(folder)
            return nullcontext()
        if not ranks.is_main():
            raise InputError(
                "cache",
                f"{self.folder} lacks what the main process has written to it; all machines have to share it",
            )
        try:
            return open_folder(folder)
        except InputError as error:
            raise InputError("cache", error.reason) from None


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


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

    Args:
        cache: the folder of all encoded texts.
        text: the text; its progress is told what happens.
        seen: the same text, as it was read before.
        choice: the tokenizer. One that is trained learns from the training part.
        scratch: a folder to encode into, if the cache is not to change.

    Raises:
        InputError: if the text is too short or changes meanwhile, the tokenizer does not suit, the folder can't be
            written, or another process is writing to it.
    """

    def opened(folder: Path) -> tuple[PreTrainedTokenizerFast, Vocabulary, list[Path]]:
        tokenizer = load_tokenizer(choice.path or folder / "tokenizer.json")
        vocabulary = vocabulary_of(tokenizer, "tokenizer" if choice.path else "data")
        return tokenizer, vocabulary, [folder / name for name in STREAMS]

    def fill(folder: Path) -> Facts:
        check_enough(text.pages(), seen.summary.characters)
        # Learning a vocabulary reads the text twice more.
        text.progress.start(seen.summary.characters * (1 if choice.path else 3))
        if choice.path is None:
            text.progress.begin("learning the vocabulary")
            learned = fit_tokenizer(Pages(text, held_out=False), choice.vocab_size)
            write_atomically(folder / "tokenizer.json", learned.backend_tokenizer.to_str())
        tokenizer, vocabulary, files = opened(folder)
        width, number = width_of(vocabulary.size), 0
        text.progress.begin("encoding the text")
        with files[0].open("wb") as training, files[1].open("wb") as held_out:
            for lot in in_lots(text.pages(), LOT):
                for page in tokenizer.backend_tokenizer.encode_batch_fast(lot, add_special_tokens=False):
                    stream = held_out if is_held_out(number) else training
                    stream.write(packed((*page.ids, vocabulary.sep), width))
                    number += 1
        check_unchanged(text, seen)
        return {}

    def open_filled(folder: Path, facts: Facts) -> EncodedText:
        tokenizer, vocabulary, files = opened(folder)
        training, held_out = (open_stream(file, width_of(vocabulary.size)) for file in files)
        counts = torch.stack([stream.counts(vocabulary.size) for stream in (training, held_out)])
        return EncodedText(training, held_out, counts, tokenizer, vocabulary)

    key = [seen.summary.fingerprint, choice.setting]
    found = Cache(cache, scratch, text.progress).entry("ids", key, fill, open_filled)
    if scratch is None:
        remember(text, seen, cache)
    return found
