"""Parallel text for translation: pairs of lines in two languages, from aligned files or tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import InputError
from . import tables

HELD_OUT = 2000
"""The most pairs that are held out if there is no validation text; of a small text, one pair in twenty is held out."""


@dataclass(frozen=True)
class Pairs:
    """Lines and their translations.

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

    def chosen(self, rows: Sequence[int]) -> Pairs:
        """Return the pairs at ``rows``, in this order."""
        return Pairs([self.source[row] for row in rows], [self.target[row] for row in rows], self.name)

    @property
    def full(self) -> list[int]:
        """Indices of the pairs that have text on both sides."""
        both = zip(self.source, self.target, strict=True)
        return [row for row, (one, other) in enumerate(both) if one.strip() and other.strip()]

    def without_empty(self) -> Pairs:
        """Return the pairs that have text on both sides."""
        return self.chosen(self.full)


def hold_out(field: str, pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Split pairs into those to train on and those to judge by, the same way in every run.

    No pair with an empty line is held out.

    Args:
        field: the argument that an error names.
        pairs: all pairs.

    Raises:
        InputError: if fewer than two pairs have text on both sides.
    """
    full = pairs.full
    if len(full) < 2:
        raise InputError(field, f"expected at least 2 pairs of lines with text on both sides, got {len(full)}")
    count = min(HELD_OUT, max(1, len(full) // 20))
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = {full[place] for place in order[:count]}
    return pairs.chosen([row for row in range(len(pairs)) if row not in held_out]), pairs.chosen(sorted(held_out))


def read_lines(field: str, file: Path) -> list[str]:
    """Return the lines of a text file, without line ends.

    Only a line feed ends a line, because other separators may occur within a sentence.

    Raises:
        InputError: if the file can't be read or is not UTF-8; the message names the line.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(field, f"cannot read {str(file)!r}: {error.strerror or error}") from None
    return split_lines(field, str(file), data)


def split_lines(field: str, name: str, data: bytes, before: int = 0) -> list[str]:
    """Decode UTF-8 and split it into lines.

    Args:
        field: the argument that an error names.
        name: the file that an error names.
        data: the file's bytes, or those of some of its lines.
        before: number of lines before them in the file.
    Raises:
        InputError: if the bytes are not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig" if not before else "utf-8")
    except UnicodeDecodeError as error:
        # The decoder does not count a byte order mark at the beginning.
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
    """Check that both files have the same number of lines.

    Raises:
        InputError: if they do not; it says where the shorter one ends and which line may be the first out of step.
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
    """Read the source and target columns of a table. Empty cells become empty lines.

    Args:
        field, columns_field: the arguments that an error names.
        file: the table.
        named: the columns, source first; None for a table that has only two.
    Raises:
        InputError: if the table can't be read, or a column is missing or holds something other than text.
    """
    if file.suffix.lower() == ".tsv":
        found = _tab_separated(field, file, named)
    else:
        found = tables.read_table(field, file, named or ())
    if named is None:
        if len(found) != 2:
            raise InputError(columns_field, f"{file} has columns {', '.join(found)}; name two of them, such as en,de")
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
    """Read one row per line; quotation marks are text. Without names, or with numbers as names, there is no header."""
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
