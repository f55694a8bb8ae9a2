"""Parallel text for translation: pairs of lines in two languages, from aligned files or tables, read as a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap, zip_longest
from pathlib import Path

import torch

from ..errors import InputError, shown
from ..lab.progress import Progress
from .read import check_once, open_table, read_lines
from .streams import in_lots

HELD_OUT = 2000
"""The most pairs that are held out if there is no validation text; of a small text, one pair in twenty is held out."""
LOT = 1024
"""Number of pairs after which the progress is told."""

Pair = tuple[str, str]
"""A line and its translation."""
Pick = Callable[[Sequence[str]], tuple[str, str]]
"""Returns the columns to read, source first, from the names of all."""


@dataclass(frozen=True)
class Pairs:
    """Pairs that fit in memory.

    Args:
        source: the source lines, as they are in the file.
        target: their translations, one per source line.
        name: where they come from, for people to read.
    """

    source: list[str]
    target: list[str]
    name: str

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Pair]:
        return zip(self.source, self.target, strict=True)


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
        for lot in in_lots(self.read(), LOT):
            self.progress.step(sum(len(one) + len(other) for one, other in lot))
            source = source or any(one.strip() for one, _ in lot)
            target = target or any(other.strip() for _, other in lot)
            yield from lot
        if not (source and target):
            raise InputError(self.field, f"no text in {self.name}")


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


def check_aligned(field: str, source: Path, sources: Sequence[str], target: Path, targets: Sequence[str]) -> None:
    """Check that two files have the same number of lines.

    Raises:
        InputError: as :func:`aligned` does.
    """
    deque(aligned(field, source, sources, target, targets), maxlen=0)


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
                raise InputError(
                    columns_field, f"{file} has columns {', '.join(found)}; name two of them, such as en,de"
                )
            return found[0], found[1]
        for name in named:
            if name not in found:
                raise InputError(columns_field, f"{file} has no column {name!r}; it has {', '.join(found)}")
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
