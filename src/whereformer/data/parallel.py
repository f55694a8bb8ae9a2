"""Parallel text: pairs of lines in two languages, read as a stream from files or tables, and encoded once.

The cache has a folder for each text and size of vocabulary, with ``tokenizer.json``, the vocabulary of both languages,
and the rows of both parts of the text. A pair is a row of two parts, the source and the target. It has no tokens if one
of its lines is empty, so the rows also tell how many pairs the text has and how many are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, starmap, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError, shown, some_of
from ..files import check_regular, write_atomically
from ..lab.fingerprint import fingerprint_of_files
from ..lab.progress import Progress
from . import subwords
from .encode import Facts, cached
from .masks import IGNORED
from .read import check_once, open_table, read_lines
from .streams import RowFile, in_lots, open_rows, width_of, write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PARTS = ("training", "held_out")
HELD_OUT = 2000
"""The most pairs that are held out if there is no validation text; of a small text, one pair in twenty is held out."""

Pair = tuple[str, str]
"""A line and its translation."""
Pick = Callable[[Sequence[str]], tuple[str, str]]
"""Returns the columns to read, source first, from the names of all."""


@dataclass(frozen=True)
class ParallelData:
    """Options that name parallel text.

    Args:
        source: lines to translate from, in UTF-8.
        target: their translations, line by line.
        data: tables with both languages, instead of two files: .parquet, .jsonl, .csv or .tsv.
        columns: columns of the tables, such as en,de. By default both, if there are only two.
        validation: whether the options are those of text to judge by, which have other names.

    Raises:
        InputError: if they do not fit together; it names one.
    """

    source: Path | None = None
    target: Path | None = None
    data: tuple[Path, ...] = ()
    columns: str | None = None
    validation: bool = False

    def __post_init__(self) -> None:
        data, source, target = map(self.name, ("data", "source", "target"))
        _ = self.both_columns
        if self.data and (self.source is not None or self.target is not None):
            raise InputError(data, f"either tables or `{source}` and `{target}`, got both")
        if not self.data and self.source is None and self.target is None:
            raise InputError(data, f"expected tables, or `{source}` and `{target}`, got none")
        if not self.data and (self.source is None or self.target is None):
            missing, other = (source, target) if self.source is None else (target, source)
            raise InputError(missing, f"expected a file to go with `{other}`, got none")

    def name(self, field: str) -> str:
        """Return the name that errors use for a field."""
        if not self.validation or field == "columns":
            return field
        return "validation" if field == "data" else f"validation_{field}"

    @property
    def both_columns(self) -> tuple[str, str] | None:
        """The names of the columns, source first; None if none are given.

        Raises:
            InputError: if there are not two different names.
        """
        if self.columns is None:
            return None
        found = tuple(part.strip() for part in self.columns.split(","))
        if len(found) != 2 or found[0] == found[1] or not all(found):
            raise InputError("columns", f"expected two columns, such as en,de, got {self.columns!r}")
        return found


@dataclass(frozen=True)
class PairFiles:
    """Pairs in files. No more of them is in memory than some rows.

    Args:
        name: where they come from, for people to read.
        field: the argument that errors about all of them name.
        files: the files, in the order in which they are read.
        fields: the argument that names each file.
        columns: the columns of tables, as the user names them.
        read: reads the files once.
        progress: is told the number of characters as they are read.

    Raises:
        InputError: when they are read, if they hold no text, and what ``read`` raises.
    """

    name: str
    field: str
    files: tuple[Path, ...]
    fields: tuple[str, ...]
    columns: str | None
    read: Callable[[], Iterator[Pair]]
    progress: Progress

    def __iter__(self) -> Iterator[Pair]:
        source = target = False
        for lot in in_lots(self.read(), subwords.LOT):
            self.progress.step(sum(len(one) + len(other) for one, other in lot))
            source = source or any(one.strip() for one, _ in lot)
            target = target or any(other.strip() for _, other in lot)
            yield from lot
        if not (source and target):
            raise InputError(self.field, f"no text in {self.name}")


def pair_files(data: ParallelData, progress: Progress) -> PairFiles:
    """Return the pairs in the files that the options name; the progress is told the characters that are read."""
    if data.source is not None and data.target is not None:
        one, other, fields = data.source, data.target, (data.name("source"), data.name("target"))

        def read_lines_of_both() -> Iterator[Pair]:
            return aligned(fields[0], one, read_lines(fields[0], one), other, read_lines(fields[1], other))

        return PairFiles(f"{one} and {other}", fields[0], (one, other), fields, None, read_lines_of_both, progress)
    field, columns_field, columns = data.name("data"), data.name("columns"), data.both_columns
    for file in data.data:
        if file.suffix.lower() != ".tsv":
            open_table(field, file)  # which checks that it is a table

    def read() -> Iterator[Pair]:
        return chain.from_iterable(table_pairs(field, columns_field, file, columns) for file in data.data)

    name = ", ".join(map(str, data.data))
    return PairFiles(name, field, data.data, (field,) * len(data.data), data.columns, read, progress)


@dataclass(frozen=True)
class Without:
    """Pairs without those in some rows."""

    pairs: Iterable[Pair]
    rows: frozenset[int]

    def __iter__(self) -> Iterator[Pair]:
        return (pair for row, pair in enumerate(self.pairs) if row not in self.rows)


def has_text(source: str, target: str) -> bool:
    """Return whether both lines of a pair have text."""
    return bool(source.strip() and target.strip())


def hold_out(field: str, pairs: Iterable[Pair]) -> tuple[Without, list[Pair]]:
    """Split pairs into those to train on and those to judge by, the same way in every run. They are read twice.

    No pair with an empty line is held out.

    Args:
        field: the argument that an error names.
        pairs: all pairs.

    Raises:
        InputError: if fewer than two pairs have text on both sides.
    """
    full = sum(starmap(has_text, pairs))
    if full < 2:
        raise InputError(field, f"expected at least 2 pairs of lines with text on both sides, got {full}")
    count = min(HELD_OUT, max(1, full // 20))
    order = torch.randperm(full, generator=torch.Generator().manual_seed(0))
    places = {*order[:count].tolist()}
    with_text = ((row, pair) for row, pair in enumerate(pairs) if has_text(*pair))
    found = dict(each for place, each in enumerate(with_text) if place in places)
    return Without(pairs, frozenset(found)), [*found.values()]


def aligned(field: str, source: Path, sources: Iterable[str], target: Path, targets: Iterable[str]) -> Iterator[Pair]:
    """Yield the lines of two files in pairs.

    Raises:
        InputError: at the end, if one has more lines; it says where the shorter one ends and which line may be the
            first out of step.
    """
    hint, lines = "", (iter(sources), iter(targets))
    for number, (one, other) in enumerate(zip_longest(*lines), 1):
        if one is None or other is None:
            more = number + sum(1 for _ in lines[one is None])
            counts = (number - 1, more) if one is None else (more, number - 1)
            shorter, longer, first = (source, target, other) if one is None else (target, source, one)
            raise InputError(
                field,
                f"{source} has {counts[0]:,} lines and {target} {counts[1]:,}: {shorter} ends where line "
                f"{number:,} of {longer} is {first[:40]!r}{hint}",
            )
        if not hint and bool(one.strip()) != bool(other.strip()):
            empty = target if one.strip() else source
            hint = f"; line {number} is the first that is empty in {empty} alone"
        yield one, other


def table_pairs(field: str, columns_field: str, file: Path, named: tuple[str, str] | None) -> Iterator[Pair]:
    """Yield the source and target columns of a table, row by row. Empty cells become empty lines.

    Args:
        field, columns_field: the arguments that an error names.
        file: the table.
        named: the columns, source first; None for a table that has only two.
    Raises:
        InputError: if the table can't be read, or a column is missing or holds something other than text.
    """

    def pick(found: Sequence[str]) -> tuple[str, str]:
        if named is None:
            if len(found) != 2:
                raise InputError(columns_field, f"{file} has columns {some_of(found)}; name two of them, such as en,de")
            return found[0], found[1]
        for name in named:
            if name not in found:
                raise InputError(columns_field, f"{file} has no column {shown(name)}; it has {some_of(found)}")
        return named

    if file.suffix.lower() == ".tsv":
        yield from _tab_separated(field, file, named, pick)
        return
    table = open_table(field, file, named or ())
    if not table.names:
        raise InputError(field, f"no text in {file}")
    columns = pick(table.names)
    for number, cells in enumerate(table.rows(columns), 1):
        for name, cell in zip(columns, cells, strict=True):
            if cell is not None and not isinstance(cell, str):
                raise InputError(columns_field, f"{file}, row {number}, {name}: expected text, got {shown(cell)}")
        yield cells[0] or "", cells[1] or ""


def _tab_separated(field: str, file: Path, named: tuple[str, str] | None, pick: Pick) -> Iterator[Pair]:
    """Yield both columns of one row per line. Quotation marks are text.

    Without names, or with numbers as names, there is no header.
    """
    header: list[str] = []
    places: tuple[int, int] | None = None
    for number, line in enumerate(read_lines(field, file), 1):
        row = line.split("\t")
        begins = False
        if places is None:
            header = [str(place) for place in range(1, len(row) + 1)]
            begins = named is not None and not set(named) <= set(header)
            if begins:
                header = row
                check_once(field, file, header)
            one, other = pick(header)
            places = header.index(one), header.index(other)
        if len(row) != len(header):
            raise InputError(
                field, f"{file}, line {number}: expected {len(header)} columns as in line 1, got {len(row)}"
            )
        if not begins:
            yield row[places[0]], row[places[1]]
    if places is None:
        raise InputError(field, f"no text in {file}")


def open_text(data: ParallelData, validation: ParallelData | None, progress: Progress) -> ParallelText:
    """Return the text to train on and to judge by; some of it is held out without ``validation``. It is read later.

    Raises:
        InputError: if a file can't be read again and again.
    """
    others = None if validation is None else pair_files(validation, progress)
    return ParallelText(pair_files(data, progress), others, progress)


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
                check_regular(field, file)

    @property
    def files(self) -> list[Path]:
        """The files, in the order in which they are read."""
        return [*self.pairs.files, *(self.validation.files if self.validation else ())]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text as it was when it was looked at first."""
        return self.hashed()

    def hashed(self) -> str:
        """Return a hash of the text as it is now: of the bytes of its files, and of what each file is."""
        validation = self.validation.fields if self.validation else None
        names = ["pairs", self.pairs.columns or "", str(self.pairs.fields), str(validation)]
        return fingerprint_of_files(self.files, names)

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


def open_or_encode(cache: Path, text: ParallelText, vocab_size: int) -> EncodedPairs:
    """Open the encoded pairs if the cache has them, else encode them there.

    The vocabulary is learned from the training pairs. Only one process may encode at a time.

    Args:
        cache: the folder of all caches.
        text: the text; its progress is told what happens.
        vocab_size: size of the vocabulary.

    Raises:
        InputError: if the text changes meanwhile, or another process is writing to the cache.
    """

    def fill(folder: Path) -> Facts:
        parts = text.parts
        # Once to learn the vocabulary, and once to encode.
        text.progress.start(2 * sum(file.stat().st_size for file in text.files))
        text.progress.begin("learning the vocabulary")
        lines = (line for pair in parts[0] if has_text(*pair) for line in pair)
        tokenizer = subwords.fit(lines, vocab_size)
        write_atomically(folder / "tokenizer.json", tokenizer.backend_tokenizer.to_str())
        text.progress.begin("encoding the text")
        for name, pairs in zip(PARTS, parts, strict=True):
            write_rows(folder, name, width_of(len(tokenizer)), _encoded(tokenizer, pairs))
        if text.hashed() != text.fingerprint:
            raise InputError(text.field, "the text changed while it was read; run the same command again")
        return {}

    return cached(cache, "pairs", [text.fingerprint, str(vocab_size)], fill, _open, text.progress)


def _open(folder: Path, facts: Facts) -> EncodedPairs:
    tokenizer = subwords.load(folder / "tokenizer.json")
    training, held_out = (open_rows(folder, name, width_of(len(tokenizer)), 2) for name in PARTS)
    return EncodedPairs(training, held_out, tokenizer)


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
