"""Encode the pairs of a parallel text once, into files beside the run, and find them again.

A cache has a folder for each text and size of vocabulary, with ``tokenizer.json``, the vocabulary of both languages,
and the rows of both parts of the text. A pair is a row of two parts, the source and the target. It has no tokens if one
of its lines is empty, so the rows also tell how many pairs the text has and how many are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_atomically
from ..lab.progress import Progress
from . import subwords
from .encode import Cache, Facts
from .fingerprint import SeenText, Summary, TextHash, check_unchanged, remember
from .parallel import Pair, PairFiles, has_text, hold_out
from .read import check_file
from .streams import RowFile, in_lots, open_rows, width_of, write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PARTS = ("training", "held_out")


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
                check_file(field, file)

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
    def parts(self) -> tuple[Iterable[Pair], Iterable[Pair]]:
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

    def fill(folder: Path) -> Facts:
        parts = text.parts
        # Once to learn the vocabulary, and once to encode.
        text.progress.start(2 * seen.summary.characters)
        text.progress.begin("learning the vocabulary")
        lines = (line for pair in parts[0] if has_text(*pair) for line in pair)
        tokenizer = subwords.fit(lines, vocab_size)
        write_atomically(folder / "tokenizer.json", tokenizer.backend_tokenizer.to_str())
        text.progress.begin("encoding the text")
        for name, pairs in zip(PARTS, parts, strict=True):
            write_rows(folder, name, width_of(len(tokenizer)), _encoded(tokenizer, pairs))
        check_unchanged(text, seen)
        return {}

    key = [seen.summary.fingerprint, str(seen.summary.documents), str(vocab_size)]
    folder, _ = Cache(cache, scratch, text.progress).entry("pairs", key, fill)
    if scratch is None:
        remember(text, seen, cache)
    tokenizer = subwords.load(folder / "tokenizer.json")
    training, held_out = (open_rows(folder, name, width_of(len(tokenizer)), 2) for name in PARTS)
    return EncodedPairs(training, held_out, tokenizer)


def _encoded(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[Pair]) -> Iterator[Sequence[list[int]]]:
    """Yield the ids of each pair's source and target."""
    for lot in in_lots(pairs, subwords.LOT):
        lines = iter(subwords.encode(tokenizer, [line for pair in lot if has_text(*pair) for line in pair]))
        yield from ((next(lines), next(lines)) if has_text(*pair) else ([], []) for pair in lot)
