"""Open the pairs of lines that a translation model is trained and judged on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ...data.read import open_table, read_lines
from ...lab.progress import Progress
from .parallel import Pair, PairFiles, ParallelText, aligned, table_pairs
from .settings import ParallelData, columns_of


def open_text(data: ParallelData, validation: ParallelData | None, progress: Progress) -> ParallelText:
    """Return the text to train on and to judge by; some of it is held out without ``validation``. It is read later.

    Raises:
        InputError: if a file can't be read again and again.
    """
    others = None if validation is None else pair_files(validation, progress)
    return ParallelText(pair_files(data, progress), others, progress)


def pair_files(data: ParallelData, progress: Progress) -> PairFiles:
    """Return the pairs in the files that the options name; the progress is told the characters that are read."""
    if data.source is not None and data.target is not None:
        one, other, fields = data.source, data.target, (data.name("source"), data.name("target"))

        def read_lines_of_both() -> Iterator[Pair]:
            return aligned(fields[0], one, read_lines(fields[0], one), other, read_lines(fields[1], other))

        return PairFiles(f"{one} and {other}", fields[0], (one, other), fields, None, read_lines_of_both, progress)
    field, columns_field = data.name("data"), data.name("columns")
    columns = columns_of(columns_field, data.columns)
    for file in data.data:
        if file.suffix.lower() != ".tsv":
            open_table(field, file)  # which checks that it is a table

    def read() -> Iterator[Pair]:
        return chain.from_iterable(table_pairs(field, columns_field, file, columns) for file in data.data)

    name = ", ".join(map(str, data.data))
    return PairFiles(name, field, data.data, (field,) * len(data.data), data.columns, read, progress)
