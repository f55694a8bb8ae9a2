"""Load the pairs of lines that a translation model is trained and judged on."""

from __future__ import annotations

from ...data.parallel import Pairs, check_aligned, read_lines, read_table
from ...errors import InputError
from .settings import ParallelData, columns_of


def load_pairs(data: ParallelData) -> Pairs:
    """Read the files that the options name.

    Raises:
        InputError: if a file is missing, is not UTF-8, or does not match the other; the message says where.
    """
    option = data.names
    if data.data:
        columns = columns_of(option["columns"], data.columns)
        parts = [read_table(option["data"], option["columns"], file, columns) for file in data.data]
        pairs = Pairs(
            [line for part in parts for line in part[0]],
            [line for part in parts for line in part[1]],
            ", ".join(map(str, data.data)),
        )
        name = option["data"]
    else:
        assert data.source is not None
        assert data.target is not None
        source, target = read_lines(option["source"], data.source), read_lines(option["target"], data.target)
        check_aligned(option["source"], data.source, source, data.target, target)
        pairs = Pairs(source, target, f"{data.source} and {data.target}")
        name = option["source"]
    if not any(line.strip() for line in pairs.source) or not any(line.strip() for line in pairs.target):
        raise InputError(name, f"no text in {pairs.name}")
    return pairs
