"""Open the pairs of lines that a translation model is trained and judged on."""

from __future__ import annotations

from collections.abc import Iterator

from ...data.read import open_table, read_lines
from ...lab.progress import Progress
from .parallel import Pair, PairFiles, Pairs, ParallelText, aligned, table_pairs
from .settings import ParallelData, columns_of


def load_pairs(data: ParallelData) -> Pairs:
    """Read all of the files that the options name.

    Raises:
        InputError: if a file is missing, is not UTF-8, or does not match the other; the message says where.
    """
    files = pair_files(data, Progress())
    found = Pairs([], [], files.name)
    for one, other in files:
        found.source.append(one)
        found.target.append(other)
    return found


def open_text(data: ParallelData, validation: ParallelData | None, progress: Progress) -> ParallelText:
    """Return the text to train on and to judge by. It is read later.

    Args:
        data: the text to train on. Some of it is held out if there is no ``validation``.
        validation: the text to judge by.
        progress: is told the number of characters as they are read.

    Raises:
        InputError: if a file can't be read again and again.
    """
    others = None if validation is None else pair_files(validation, progress)
    return ParallelText(pair_files(data, progress), others, progress)


def pair_files(data: ParallelData, progress: Progress) -> PairFiles:
    """Return the pairs in the files that the options name."""
    option = data.names
    if data.data:
        field, columns = option["data"], columns_of(option["columns"], data.columns)
        for file in data.data:
            if file.suffix.lower() != ".tsv":
                open_table(field, file)  # which checks that it is a table

        def read() -> Iterator[Pair]:
            for file in data.data:
                yield from table_pairs(field, option["columns"], file, columns)

        name, fields = ", ".join(map(str, data.data)), (field,) * len(data.data)
        return PairFiles(name, field, data.data, fields, data.columns, read, progress)
    source, target, fields = data.source, data.target, (option["source"], option["target"])
    assert source is not None
    assert target is not None

    def read_aligned() -> Iterator[Pair]:
        return aligned(fields[0], source, read_lines(fields[0], source), target, read_lines(fields[1], target))

    return PairFiles(f"{source} and {target}", fields[0], (source, target), fields, None, read_aligned, progress)
