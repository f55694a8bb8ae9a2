"""Token ids in files, written once: streams read a window at a time and rows one at a time, whatever their size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Item = TypeVar("Item")

BLOCK_TOKENS = 1 << 20
"""The number of tokens that are read at a time when a whole stream is read."""


@dataclass(frozen=True)
class TokenFile:
    """A stream of ids in a file, as int32. A slice of it is read from the file and returned as int64.

    The file is not mapped into memory: mapped pages count as the process's memory, and a pass over the text would map
    all of it. It does not stay open either, because an open file can't be shared with other processes.
    """

    path: Path

    def __len__(self) -> int:
        return self.path.stat().st_size // 4

    def __getitem__(self, index: slice) -> Tensor:
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"expected a slice without a step, got {step}")
        # C code would turn a path into text by calling Python, and Ctrl-C in that call would become a SystemError.
        ids = np.fromfile(str(self.path), np.int32, max(0, stop - start), offset=start * 4)
        return torch.from_numpy(ids).long()

    def count_ids(self, size: int) -> Tensor:
        """Return how often each of ``size`` ids occurs, (size,) int64."""
        counts = torch.zeros(size, dtype=torch.long)
        for start in range(0, len(self), BLOCK_TOKENS):
            counts += torch.bincount(self[start : start + BLOCK_TOKENS], minlength=size)
        return counts


Stream = Tensor | TokenFile
"""A stream of token ids, (tokens,): a tensor, or a file of them."""


def read_windows(stream: Stream, starts: Sequence[int], length: int) -> Tensor:
    """Return the windows that begin at ``starts``, (windows, length) int64; a file is opened once for all of them."""
    if isinstance(stream, Tensor):
        return torch.stack([stream[start : start + length] for start in starts])
    ids = bytearray()
    with stream.path.open("rb", buffering=0) as file:
        for start in starts:
            file.seek(4 * start)
            ids += file.read(4 * length)
    return torch.frombuffer(ids, dtype=torch.int32).view(len(starts), length).long()


def to_bytes(ids: Sequence[int]) -> bytes:
    """Return ids as the bytes of a :class:`TokenFile`."""
    return np.array(ids, np.int32).tobytes()


@dataclass(frozen=True)
class RowFile:
    """Rows of ids, each in one or more parts, such as a line and its translation. Only their lengths are in memory."""

    ids: Stream  # (tokens,), the ids of all rows, part after part
    starts: Tensor  # (rows,) int64, where each row begins
    lengths: Tensor  # (rows, parts) int32, the number of tokens in each part of a row

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> Sequence[Tensor]:
        """Return the parts of a row, each (tokens,) int64."""
        start, lengths = int(self.starts[row]), self.lengths[row].tolist()
        return self.ids[start : start + sum(lengths)].split(lengths)

    def select(self, rows: Tensor) -> RowFile:
        """Return the rows at the indices ``rows``, (chosen,), in this order."""
        return replace(self, starts=self.starts[rows], lengths=self.lengths[rows])


def write_rows(folder: Path, name: str, rows: Iterable[Sequence[Sequence[int]]]) -> None:
    """Write rows, each a sequence of parts, to two files in a folder: their ids, and the lengths of their parts."""
    with (folder / f"{name}.ids").open("wb") as ids, (folder / f"{name}.lengths").open("wb") as lengths:
        for row in rows:
            ids.write(b"".join(map(to_bytes, row)))
            lengths.write(to_bytes([*map(len, row)]))


def open_rows(folder: Path, name: str, parts: int) -> RowFile:
    """Open the rows that :func:`write_rows` wrote, of ``parts`` parts each."""
    lengths = TokenFile(folder / f"{name}.lengths")[:].int().view(-1, parts)
    tokens = lengths.sum(1)
    return RowFile(TokenFile(folder / f"{name}.ids"), tokens.cumsum(0) - tokens, lengths)


def iter_chunks(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Yield the items in lists of ``count``; the last list may be shorter."""
    rest = iter(items)
    while chunk := list(islice(rest, count)):
        yield chunk
