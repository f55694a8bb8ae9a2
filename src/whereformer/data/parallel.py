"""Parallel text: pairs of lines in two languages, read as a stream from files or tables, and encoded once.

The cache has a folder for each text and size of vocabulary, with the tokenizer of both languages,
and the rows of both parts of the text. A pair is a row of two parts, the source and the target. It has no tokens if one
of its lines is empty, so the rows also tell how many pairs the text has and how many are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError, shown, some_of
from ..files import check_regular
from ..lab.manifest import fingerprint_of_files
from . import subwords
from .encode import Facts, cached
from .read import Table, read_lines
from .streams import RowFile, in_lots, open_rows, write_rows
from .tokenizers import read_tokenizer
from .windows import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PARTS = ("training", "held_out")
EVERY, HELD_OUT = 20, 2000
"""One pair in so many is held out if there is no validation text, and the most pairs that are."""

Pair = tuple[str, str]
"""A line and its translation."""


@dataclass(frozen=True)
class PairFiles:
    """Pairs in files, as options name them. Each iteration reads them anew, with no more than some rows in memory.

    Args:
        source: lines to translate from, in UTF-8.
        target: their translations, line by line.
        data: tables with both languages, instead of two files: .parquet, .jsonl, .csv or .tsv.
        columns: columns of the tables, such as en,de. By default both, if there are only two.
        validation: whether the options are those of text to judge by, which have other names.

    Raises:
        InputError: if they do not fit together, or a file is not there or can't be read again and again, as a pipe;
            when they are read, if a file can't be, or none holds text. It names the option.
    """

    source: Path | None = None
    target: Path | None = None
    data: tuple[Path, ...] = ()
    columns: str | None = None
    validation: bool = False

    def __post_init__(self) -> None:
        files = self.source is not None, self.target is not None
        if bool(self.data) == any(files) or any(files) != all(files):
            data, source, target = map(self._option, ("data", "source", "target"))
            raise InputError(data, f"expected either tables, or both `{source}` and `{target}`")
        if self.columns is not None and not (len(self._named) == len(set(self._named)) == 2 and all(self._named)):
            raise InputError("columns", f"expected two columns, such as en,de, got {self.columns!r}")
        for option, file in self.files:
            if self.data:
                Table(option, file)
            else:
                check_regular(option, file)

    @property
    def _named(self) -> list[str]:
        """The names of the columns, source first, if they are given."""
        return [] if self.columns is None else [name.strip() for name in self.columns.split(",")]

    def _option(self, name: str) -> str:
        """Return the name that errors use for an option."""
        return name if not self.validation else "validation" if name == "data" else f"validation_{name}"

    @property
    def files(self) -> list[tuple[str, Path]]:
        """The files in the order in which they are read, each with the option that names it."""
        if self.source is None or self.target is None:
            return [(self._option("data"), file) for file in self.data]
        return [(self._option("source"), self.source), (self._option("target"), self.target)]

    @property
    def name(self) -> str:
        """Where the pairs come from, for people to read."""
        return (", " if self.data else " and ").join(str(file) for _, file in self.files)

    @property
    def field(self) -> str:
        """The option that errors about all of the pairs name."""
        return self.files[0][0]

    def __iter__(self) -> Iterator[Pair]:
        pairs: Iterator[Pair] = chain.from_iterable(map(self._table, self.data))
        if self.source is not None and self.target is not None:
            pairs = _aligned(*self.files)
        seen = [False, False]  # text in each language
        for pair in pairs:
            seen = [before or bool(line.strip()) for before, line in zip(seen, pair, strict=True)]
            yield pair
        if not all(seen):
            raise InputError(self.field, f"no text in {self.name}")

    def _table(self, file: Path) -> Iterator[Pair]:
        """Yield two columns of a table, row by row. Empty cells become empty lines.

        In .tsv files quotation marks are text. Without names, or with numbers as names, these have no header.
        """
        tabs, names = file.suffix.lower() == ".tsv", self._named
        table = Table(self.field, file, quotes=not tabs, header=not tabs or not all(map(str.isdigit, names)))
        if not names and table.names:
            if len(table.names) != 2:
                told = f"{file} has columns {some_of(table.names)}; name two of them, such as en,de"
                raise InputError("columns", told)
            names = table.names
        for number, cells in enumerate(table.rows(names), 1):
            for name, cell in zip(names, cells, strict=True):
                if cell is not None and not isinstance(cell, str):
                    raise InputError("columns", f"{file}, row {number}, {name}: expected text, got {shown(cell)}")
            yield cells[0] or "", cells[1] or ""


def has_text(source: str, target: str) -> bool:
    """Return whether both lines of a pair have text."""
    return bool(source.strip() and target.strip())


@dataclass(frozen=True)
class Part:
    """The pairs that are held out to judge by, or the others, the same in every run: only their place decides.

    No pair with an empty line is held out.
    """

    pairs: Iterable[Pair]
    held_out: bool

    def __iter__(self) -> Iterator[Pair]:
        full = 0
        for pair in self.pairs:
            full += has_text(*pair)
            held_out = has_text(*pair) and full % EVERY == 1 and full <= EVERY * HELD_OUT
            if held_out == self.held_out:
                yield pair


def _aligned(source: tuple[str, Path], target: tuple[str, Path]) -> Iterator[Pair]:
    """Yield the lines of two files in pairs.

    Raises:
        InputError: at the end, if one has more lines.
    """
    for number, pair in enumerate(zip_longest(read_lines(*source), read_lines(*target))):
        if None in pair:
            file = (source, target)[pair.index(None)][1]
            raise InputError(source[0], f"expected as many lines as translations, but {file} ends after {number:,}")
        yield pair


@dataclass(frozen=True)
class ParallelText:
    """Parallel text to train on and to judge by, read anew in every pass.

    Args:
        pairs: the pairs to train on. Without ``validation``, some of them are held out to judge by.
        validation: pairs to judge by.
    """

    pairs: PairFiles
    validation: PairFiles | None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text as it was when it was looked at first."""
        return self.hashed()

    def hashed(self) -> str:
        """Return a hash of the text as it is now: of the bytes of its files, and of what each file is."""
        files = self.pairs.files + (self.validation.files if self.validation else [])
        names = [self.pairs.columns or "", str(len(self.pairs.files)), *(option for option, _ in files)]
        return fingerprint_of_files([file for _, file in files], names)

    @property
    def sources(self) -> list[str]:
        """Where each of the :data:`PARTS` comes from, for people to read."""
        return [self.pairs.name, (self.validation or self.pairs).name]

    @cached_property
    def parts(self) -> tuple[Iterable[Pair], Iterable[Pair]]:
        """The :data:`PARTS`: the pairs to train on and those to judge by."""
        if self.validation:
            return self.pairs, self.validation
        return Part(self.pairs, held_out=False), Part(self.pairs, held_out=True)


def open_or_encode(
    cache: Path, text: ParallelText, vocab_size: int, say: Callable[[str], object]
) -> tuple[dict[str, RowFile], PreTrainedTokenizerFast]:
    """Open the encoded pairs if the cache has them, else encode them there.

    The vocabulary is learned from the training pairs. Only one process may encode at a time.

    Args:
        cache: the folder of all caches.
        text: the text.
        vocab_size: size of the vocabulary.
        say: is told what happens.

    Returns:
        The pairs of each of the :data:`PARTS`, each a row of source and target with the ends of lines; and the
        tokenizer of both languages.

    Raises:
        InputError: if the text changes meanwhile, or another process is writing to the cache.
    """

    def fill(folder: Path) -> Facts:
        say("learning the vocabulary")
        lines = (line for pair in text.parts[0] if has_text(*pair) for line in pair)
        tokenizer = subwords.fit(lines, vocab_size)
        tokenizer.save_pretrained(folder)
        say("encoding the text")
        for name, pairs in zip(PARTS, text.parts, strict=True):
            write_rows(folder, name, _encoded(tokenizer, pairs))
        if text.hashed() != text.fingerprint:
            raise InputError(text.pairs.field, "the text changed while it was read; run the same command again")
        return {}

    folder, _ = cached(cache, "pairs", [text.fingerprint, str(vocab_size)], fill, say)
    tokenizer: Any = read_tokenizer(folder, "cache")
    return {name: open_rows(folder, name, 2) for name in PARTS}, tokenizer


def _encoded(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[Pair]) -> Iterator[Sequence[list[int]]]:
    """Yield the ids of each pair's source and target."""
    for lot in in_lots(pairs, subwords.LOT):
        lines = iter(subwords.encode(tokenizer, [line for pair in lot if has_text(*pair) for line in pair]))
        yield from ((next(lines), next(lines)) if has_text(*pair) else ([], []) for pair in lot)


def collate(pairs: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Make a batch: ``input_ids``, ``labels`` (-100 after a target's end) and, if any source is padded, their mask."""
    sources, targets = zip(*pairs, strict=True)
    lengths = torch.tensor([len(source) for source in sources])
    batch = {
        "input_ids": pad_sequence(list(sources), batch_first=True, padding_value=subwords.PAD),
        "labels": pad_sequence(list(targets), batch_first=True, padding_value=IGNORED),
    }
    width = batch["input_ids"].shape[1]
    if int(lengths.min()) < width:
        # Attention is faster without a mask.
        batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
    return batch
