"""Parallel text: lines of two languages that belong together, from aligned files or tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import InputError
from . import tables

HELD_OUT = 2000
"""Pairs that are held out where no validation text is given, at most; of a small text one in twenty."""


@dataclass(frozen=True)
class Pairs:
    """Lines and what they are translated to.

    Args:
        source: as they are in the file.
        target: as many.
        name: where they came from, for people.
    """

    source: list[str]
    target: list[str]
    name: str

    def __len__(self) -> int:
        return len(self.source)

    def chosen(self, rows: Sequence[int]) -> Pairs:
        """Some of them, in this order."""
        return Pairs([self.source[row] for row in rows], [self.target[row] for row in rows], self.name)

    @property
    def full(self) -> list[int]:
        """Rows that have text on both sides."""
        both = zip(self.source, self.target, strict=True)
        return [row for row, (one, other) in enumerate(both) if one.strip() and other.strip()]

    def without_empty(self) -> Pairs:
        """Those that have text on both sides."""
        return self.chosen(self.full)


def hold_out(field: str, pairs: Pairs) -> tuple[Pairs, Pairs]:
    """What to train on and what to judge by, always the same pairs; none with an empty line is held out.

    Args:
        field: what an error names.
        pairs: all.

    Raises:
        InputError: if there is too little.
    """
    full = pairs.full
    if len(full) < 2:
        raise InputError(field, f"expected at least 2 pairs of lines with text on both sides, got {len(full)}")
    count = min(HELD_OUT, max(1, len(full) // 20))
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = {full[place] for place in order[:count]}
    return pairs.chosen([row for row in range(len(pairs)) if row not in held_out]), pairs.chosen(sorted(held_out))


def read_lines(field: str, file: Path) -> list[str]:
    """The lines of a text file, without what ends them. Only a line feed does: other separators may be in a sentence.

    Raises:
        InputError: naming the line that is not UTF-8.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(field, f"cannot read {str(file)!r}: {error.strerror or error}") from None
    return split_lines(field, str(file), data)


def split_lines(field: str, name: str, data: bytes, before: int = 0) -> list[str]:
    """UTF-8 as lines.

    Args:
        field: what an error names, and
        name: the file.
        data: its bytes, or some of its lines.
        before: lines that came before them.
    """
    try:
        text = data.decode("utf-8-sig" if not before else "utf-8")
    except UnicodeDecodeError as error:
        # A mark at the beginning is not in what was decoded.
        mark = 3 if not before and data.startswith(b"\xef\xbb\xbf") else 0
        place = error.start + mark
        line = before + data.count(b"\n", 0, place) + 1
        column = place - data.rfind(b"\n", 0, place)
        raise InputError(
            field, f"{name}, line {line}: not UTF-8 text (byte {column} of the line: {error.reason})"
        ) from None
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def check_aligned(field: str, source: Path, sources: Sequence[str], target: Path, targets: Sequence[str]) -> None:
    """Raise unless both files have as many lines.

    Raises:
        InputError: saying where one of them ends, and where they may have come apart.
    """
    if len(sources) == len(targets):
        return
    shorter, longer, rest = (source, target, targets) if len(sources) < len(targets) else (target, source, sources)
    end = min(len(sources), len(targets))
    hint = ""
    for number, (one, other) in enumerate(zip(sources, targets, strict=False), 1):
        if bool(one.strip()) != bool(other.strip()):
            empty = target if one.strip() else source
            hint = f"; line {number} is the first that is empty in {empty} alone"
            break
    raise InputError(
        field,
        f"{source} has {len(sources):,} lines and {target} {len(targets):,}: {shorter} ends where line "
        f"{end + 1:,} of {longer} is {rest[end][:40]!r}{hint}",
    )


def read_table(
    field: str, columns_field: str, file: Path, named: tuple[str, str] | None
) -> tuple[list[str], list[str]]:
    """Both columns of a table. Cells that hold nothing are empty lines.

    Args:
        field, columns_field: what an error names.
        file: the table.
        named: the columns, source first; None for a table that has only two.
    Raises:
        InputError: for a table that can't be read, or columns that are not there or hold no text.
    """
    if file.suffix.lower() == ".tsv":
        found = _tab_separated(field, file, named)
    else:
        found = tables.read_table(field, file, named or ())
    if named is None:
        if len(found) != 2:
            raise InputError(columns_field, f"{file} has columns {', '.join(found)}; expected two of them, as en,de")
        first, second = found
        named = first, second
    texts = []
    for name in named:
        if name not in found:
            raise InputError(columns_field, f"{file} has no column {name!r}; it has {', '.join(found)}")
        for number, cell in enumerate(found[name], 1):
            if cell is not None and not isinstance(cell, str):
                raise InputError(columns_field, f"{file}, row {number}, {name}: expected text, got {cell!r}")
        texts.append([cell or "" for cell in found[name]])
    return texts[0], texts[1]


def _tab_separated(field: str, file: Path, named: Sequence[str] | None) -> tables.Columns:
    """A line a row, quotation marks are text. Without names, or with numbers for names, there is no header."""
    rows = [line.split("\t") for line in read_lines(field, file)]
    if not rows:
        raise InputError(field, f"no text in {file}")
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise InputError(field, f"{file}, line {number}: expected {width} columns as in line 1, got {len(row)}")
    header = [str(number) for number in range(1, width + 1)]
    if named is not None and not set(named) <= set(header):
        header = rows.pop(0)
        for name in header:
            if header.count(name) > 1:
                raise InputError(field, f"{file} has more than one column {name!r}")
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}
