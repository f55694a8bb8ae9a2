"""Encode the pairs of a parallel text once, into files beside the run, and find them again.

A cache has a folder for each text and size of vocabulary, with ``tokenizer.json``, the vocabulary of both languages,
and the rows of both parts of the text. A pair is a row of two parts, the source and the target. It has no tokens if one
of its lines is empty, so the rows also tell how many pairs the text has and how many are empty.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..lab.progress import Progress
from . import subwords
from .corpus import Summary, fingerprint
from .hashing import TextHash
from .parallel import Pair, PairFiles, PairStream, has_text, hold_out
from .row_files import RowFile, append_rows, file_names, open_rows
from .seen import SeenText, check_unchanged, remember
from .shards import Entry, Index, Lots
from .streams import Appended, width_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARD = 1 << 16
"""Number of pairs in a shard: a few seconds of work."""
LOT = 1024
"""Number of pairs that are encoded at a time, by all processors."""
PARTS = ("training", "held_out")
Row = Sequence[Sequence[int]]
"""The ids of a source and of its target."""


class ParallelText:
    """Parallel text to train on and to judge by, read anew in every pass.

    Args:
        pairs: the pairs to train on. Without ``validation``, some of them are held out to judge by.
        validation: pairs to judge by.
        progress: is told the number of characters as they are read.

    Raises:
        InputError: if a file is not there, or can't be read again and again, as a pipe.
    """

    def __init__(self, pairs: PairFiles, validation: PairFiles | None, progress: Progress) -> None:
        self.pairs, self.validation, self.progress = pairs, validation, progress
        self.field = pairs.field
        for each in (pairs, validation or pairs):
            for field, file in zip(each.fields, each.files, strict=True):
                _check_again(field, file)

    @property
    def files(self) -> list[Path]:
        """The files, in the order in which they are read."""
        return [*self.pairs.files, *(self.validation.files if self.validation else ())]

    @property
    def names(self) -> list[str]:
        """What decides, besides the files, which text it is."""
        return ["pairs", self.pairs.columns or "", *self.sources]

    @property
    def sources(self) -> list[str]:
        """Where each of the :data:`PARTS` comes from, for people to read."""
        return [self.pairs.name, (self.validation or self.pairs).name]

    @cached_property
    def parts(self) -> tuple[PairStream, PairStream]:
        """The :data:`PARTS`: the pairs to train on and those to judge by."""
        if self.validation is not None:
            return self.pairs, self.validation
        self.progress.begin("holding pairs out")
        return hold_out(self.field, self.pairs)

    def summarize(self) -> Summary:
        """Read all of it and summarize it: the hash of each part's sources, their number, its targets and theirs."""
        found, counts, characters = TextHash(), [], 0
        size = sum(file.stat().st_size for file in self.files)
        self.progress.start(size * (4 if self.validation is None else 2))
        parts = self.parts
        self.progress.begin("reading the text")
        for part in parts:
            for side in (0, 1):
                count = 0
                for pair in part:
                    characters += found.add([pair[side]])
                    count += 1
                found.add([str(count)])
            counts.append(count)
        return Summary(found.short(), counts[0], characters)


def _check_again(field: str, file: Path) -> None:
    """Check that a file is there and can be read again and again."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise InputError(field, f"cannot read {str(file)!r}: {error.strerror or error}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(field, f"expected a file, which is read several times, got a pipe or a device: {str(file)!r}")


@dataclass(frozen=True)
class EncodedPairs:
    """A parallel text in a cache.

    Args:
        training, held_out: the pairs, each a row of two parts, source and target; lines include their ends.
        tokenizer: the tokenizer of both languages.
    """

    training: RowFile
    held_out: RowFile
    tokenizer: PreTrainedTokenizerFast


def open_or_encode(
    cache: Path, text: ParallelText, seen: SeenText, vocab_size: int, scratch: Path | None = None
) -> EncodedPairs:
    """Open the encoded pairs if the cache has them, else encode them there, or in ``scratch`` if it is given.

    The vocabulary is learned from the training pairs. Only one process may encode at a time.

    Args:
        cache: the folder of all caches.
        text: the text; its progress is told what happens.
        seen: the same text, as it was read before.
        vocab_size: size of the vocabulary.
        scratch: a folder to encode into, if the cache is not to change.

    Raises:
        InputError: if the text changes meanwhile, the folder can't be written, or another process is writing to it.
    """
    entry = _entry(cache, seen, vocab_size)
    index = entry.complete()
    if index is None:
        entry = entry.within(scratch)
        with entry.locked():
            index = _encoded(entry, text, seen, vocab_size)
    if scratch is None:
        remember(text, seen, cache)
    return _opened(entry, index)


def _entry(cache: Path, seen: SeenText, vocab_size: int) -> Entry:
    key = fingerprint([seen.summary.fingerprint, str(seen.summary.documents), str(vocab_size)])
    return Entry(cache / f"pairs-{key}", tuple(name for part in PARTS for name in file_names(part)))


def _encoded(entry: Entry, text: ParallelText, seen: SeenText, vocab_size: int) -> Index:
    training, held_out = text.parts
    # Once to learn the vocabulary, and once to encode.
    text.progress.start(2 * seen.summary.characters)

    def learn() -> str:
        lines = (line for pair in training if has_text(*pair) for line in pair)
        return subwords.fit(lines, vocab_size).backend_tokenizer.to_str()

    def pairs() -> Iterator[tuple[int, Pair]]:
        yield from ((0, pair) for pair in training)
        yield from ((1, pair) for pair in held_out)

    index = entry.begin(text.progress, learn)
    tokenizer = subwords.load(entry.tokenizer)
    width = width_of(len(tokenizer))
    text.progress.begin("encoding the text")

    def write(first: int, lot: list[tuple[int, Pair]], files: list[Appended]) -> None:
        full = [line for _, pair in lot if has_text(*pair) for line in pair]
        lines = iter(subwords.encode_lot(tokenizer, full))
        rows: tuple[list[Row], list[Row]] = [], []
        for part, pair in lot:
            rows[part].append((next(lines), next(lines)) if has_text(*pair) else ((), ()))
        append_rows(files[:2], rows[0], width)
        append_rows(files[2:], rows[1], width)

    index = entry.extend(index, pairs(), Lots(LOT, SHARD), write)
    check_unchanged(text, seen, entry)
    return entry.finish(index, {})


def _opened(entry: Entry, index: Index) -> EncodedPairs:
    tokenizer = subwords.load(entry.tokenizer)
    width = width_of(len(tokenizer))
    training, held_out = (
        open_rows(entry.folder, part, width, 2, [index.size(2 * place), index.size(2 * place + 1)])
        for place, part in enumerate(PARTS)
    )
    return EncodedPairs(training, held_out, tokenizer)
