"""Encode a text once, into files beside the run, and find them again.

A cache has a folder for each text and tokenizer. It holds ``training.ids`` and ``held_out.ids`` (the streams),
``tokenizer.json`` if that was trained on the text, and ``index.json``, which lists the complete shards. A shard is a
stretch of pages. It is listed once the disk has it, so an interrupted encoding continues after the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError
from ..files import write_atomically
from ..runs.folder import open_folder
from ..runs.results import from_json, read_json, write_json
from .corpus import Pages, Text, check_enough, fingerprint, is_held_out
from .seen import SeenText, files_of, remember
from .streams import Appended, TokenFile, checksum, in_lots, packed, width_of
from .tokenizers import Vocabulary, fit_tokenizer, load_tokenizer, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
"""Format version of a cache. Another version's cache is made again."""
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
        return fingerprint([load_tokenizer(self.path).backend_tokenizer.to_str()])


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


@dataclass(frozen=True)
class Shard:
    """A stretch of pages: their number, and for each stream the size in bytes and the CRC-32 of their ids."""

    pages: int
    sizes: tuple[int, int]
    checksums: tuple[int, int]


@dataclass(frozen=True)
class Index:
    """What a cache holds so far.

    Args:
        tokenizer: hash of ``tokenizer.json``; None if the tokenizer was not trained on this text.
        shards: the complete shards, in order.
        counts: how often each token occurs in each stream; None until all pages are encoded.
        format: the format of the cache.
    """

    tokenizer: str | None
    shards: list[Shard] = field(default_factory=list)
    counts: tuple[list[int], list[int]] | None = None
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        """Write ``index.json``, with a hash of its own content."""
        content = asdict(self)
        write_json(folder / "index.json", {"hash": _hash(json.dumps(content).encode()), "index": content})


def open_or_encode(
    cache: Path, text: Text, seen: SeenText, choice: TokenizerChoice, scratch: Path | None = None
) -> EncodedText:
    """Open an encoded text if the cache has it, else encode it there, or in the folder ``scratch`` if there is one.

    Raises:
        InputError: as :func:`encode` does.
    """
    found = open_encoded(cache, seen, choice)
    if found is None:
        return encode(scratch or cache, text, seen, choice)
    if scratch is None:
        remember(text, seen, cache)
    return found


def open_encoded(cache: Path, seen: SeenText, choice: TokenizerChoice) -> EncodedText | None:
    """Open an encoded text if the cache has all of it, undamaged, else return None. Every byte is checked."""
    folder = _folder(cache, seen, choice)
    index = _load(folder)
    if index is None or index.counts is None or _intact(folder, index.shards) < len(index.shards):
        return None
    return _opened(folder, index, choice)


def encode(cache: Path, text: Text, seen: SeenText, choice: TokenizerChoice) -> EncodedText:
    """Encode a text into the cache, or the part of it that is missing there, and open it.

    Only one process may do this at a time. The others may call :func:`open_encoded` afterwards.

    Args:
        cache: the folder of all caches.
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
    folder = _folder(cache, seen, choice)
    with _locked(folder):
        index = _begun(folder, text, choice)
        tokenizer, vocabulary = _tokenizer(folder, choice)
        text.progress.begin("encoding the text")
        for shard in _new_shards(folder, text, tokenizer, vocabulary, index.shards):
            index = replace(index, shards=[*index.shards, shard])
            index.save(folder)
        if files_of(text) != seen.files:
            (folder / "index.json").unlink()
            raise InputError("data", "the text changed while it was read; run the same command again")
        counts = [stream.counts(vocabulary.size).tolist() for stream in _streams(folder, vocabulary, index.shards)]
        index = replace(index, counts=(counts[0], counts[1]))
        index.save(folder)
        remember(text, seen, cache)
    return _opened(folder, index, choice)


def _folder(cache: Path, seen: SeenText, choice: TokenizerChoice) -> Path:
    return cache / f"ids-{fingerprint([seen.summary.fingerprint, choice.setting])}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        lock = open_folder(folder)
    except InputError as error:
        raise InputError("cache", error.reason) from None
    with lock:
        yield


def _load(folder: Path) -> Index | None:
    """Return the index, or None if there is none that fits the tokenizer beside it."""
    try:
        found = read_json(folder / "index.json")
        index = from_json(Index, found["index"])
        intact = found["hash"] == _hash(json.dumps(found["index"]).encode())
        fits = index.tokenizer is None or index.tokenizer == _hash((folder / "tokenizer.json").read_bytes())
        if intact and fits and index.format == FORMAT:
            return index
    except (OSError, ValueError, KeyError):
        pass
    return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _begun(folder: Path, text: Text, choice: TokenizerChoice) -> Index:
    """Return the index of the shards that an earlier encoding left intact, or begin with the tokenizer."""
    index = _load(folder)
    if index is None:
        if choice.path is None:
            text.progress.begin("learning the vocabulary")
            tokenizer = fit_tokenizer(Pages(text, held_out=False), choice.vocab_size)
            write_atomically(folder / "tokenizer.json", tokenizer.backend_tokenizer.to_str())
        index = Index(None if choice.path else _hash((folder / "tokenizer.json").read_bytes()))
        index.save(folder)
        return index
    intact = _intact(folder, index.shards)
    if intact < len(index.shards):
        text.progress.line(f"{folder} is damaged after {intact} of {len(index.shards)} shards; encoding the rest again")
    elif intact:
        text.progress.line(f"continuing after {intact} encoded shards in {folder}")
    return Index(index.tokenizer, index.shards[:intact])


def _intact(folder: Path, shards: Sequence[Shard]) -> int:
    """Return the number of shards before the first damaged one."""
    try:
        with ExitStack() as stack:
            files = [stack.enter_context((folder / name).open("rb")) for name in STREAMS]
            for count, shard in enumerate(shards):
                found = [checksum(file, size) for file, size in zip(files, shard.sizes, strict=True)]
                if found != list(shard.checksums):
                    return count
    except OSError:
        return 0
    return len(shards)


def _tokenizer(folder: Path, choice: TokenizerChoice) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    tokenizer = load_tokenizer(choice.path or folder / "tokenizer.json")
    return tokenizer, vocabulary_of(tokenizer, "tokenizer" if choice.path else "data")


def _new_shards(
    folder: Path, text: Text, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary, before: Sequence[Shard]
) -> Iterator[Shard]:
    """Encode the pages that follow the shards that are there; yield each shard when the disk has it."""
    width, first = width_of(vocabulary.size), sum(shard.pages for shard in before)
    with ExitStack() as stack:
        files = [
            stack.enter_context(Appended(folder / name, sum(shard.sizes[place] for shard in before)))
            for place, name in enumerate(STREAMS)
        ]
        pages = 0

        def ended() -> Shard:
            (size, crc), (held_out_size, held_out_crc) = (file.end_shard() for file in files)
            return Shard(pages, (size, held_out_size), (crc, held_out_crc))

        for lot in in_lots(islice(text.pages(), first, None), LOT):
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(lot, add_special_tokens=False)
            for index, page in enumerate(encoded, first):
                files[is_held_out(index)].write(packed((*page.ids, vocabulary.sep), width))
            first, pages = first + len(lot), pages + len(lot)
            if pages >= SHARD:
                yield ended()
                pages = 0
        if pages:
            yield ended()


def _streams(folder: Path, vocabulary: Vocabulary, shards: Sequence[Shard]) -> list[TokenFile]:
    width = width_of(vocabulary.size)
    return [
        TokenFile(folder / name, width, sum(shard.sizes[place] for shard in shards) // width)
        for place, name in enumerate(STREAMS)
    ]


def _opened(folder: Path, index: Index, choice: TokenizerChoice) -> EncodedText:
    tokenizer, vocabulary = _tokenizer(folder, choice)
    training, held_out = _streams(folder, vocabulary, index.shards)
    return EncodedText(training, held_out, torch.tensor(index.counts), tokenizer, vocabulary)
