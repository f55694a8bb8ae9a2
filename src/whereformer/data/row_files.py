"""Rows of token ids in a file, read one at a time. Only where each row begins is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .streams import Appended, Stream, TokenFile, packed

LENGTH = 4
"""Bytes of a length in a file."""


@dataclass(frozen=True)
class RowFile:
    """Rows of ids, each in one or more parts, such as a line and its translation.

    Args:
        ids: (tokens,), the ids of all rows, part after part.
        starts: (rows,) int64, where each row begins.
        lengths: (rows, parts) int32, the number of tokens in each part of a row.
    """

    ids: Stream
    starts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> Sequence[Tensor]:
        """Return the parts of a row, each (tokens,) int64."""
        start, lengths = int(self.starts[row]), self.lengths[row].tolist()
        return self.ids[start : start + sum(lengths)].split(lengths)

    def chosen(self, rows: Tensor) -> RowFile:
        """Return the rows at the indices ``rows``, (chosen,), in this order."""
        return replace(self, starts=self.starts[rows], lengths=self.lengths[rows])


def file_names(name: str) -> tuple[str, str]:
    """Return the names of the two files of some rows: their ids and their lengths."""
    return f"{name}.ids", f"{name}.lengths"


def append_rows(files: Sequence[Appended], rows: Iterable[Sequence[Sequence[int]]], width: int) -> None:
    """Append rows to the files of :func:`file_names`.

    Args:
        files: both files.
        rows: for each row its parts, and for each part its ids.
        width: bytes per id, as :func:`whereformer.data.streams.width_of` returns it.
    """
    ids, lengths = files
    parts = [part for row in rows for part in row]
    ids.write(b"".join(packed(part, width) for part in parts))
    lengths.write(packed(map(len, parts), LENGTH))


def open_rows(folder: Path, name: str, width: int, parts: int, sizes: Sequence[int]) -> RowFile:
    """Open the rows in a folder.

    Args:
        folder: the folder.
        name: the name of the rows, as :func:`file_names` takes it.
        width: bytes per id.
        parts: number of parts in a row.
        sizes: bytes of the two files; what follows them does not count.
    """
    ids, lengths = (folder / each for each in file_names(name))
    content = bytearray(sizes[1])
    with lengths.open("rb") as file:
        file.readinto(content)
    found = torch.frombuffer(content, dtype=torch.int32) if content else torch.zeros(0, dtype=torch.int32)
    found = found.view(-1, parts)
    tokens = found.sum(1)
    return RowFile(TokenFile(ids, width, sizes[0] // width), tokens.cumsum(0) - tokens, found)
