"""Token ids in files, written once: streams read a window at a time and rows one at a time, whatever their size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..lab.json_files import check_that

Item = TypeVar("Item")

BLOCK = 1 << 20
"""Number of tokens that are read at a time when a whole stream is read."""
LOT = 1 << 12
"""Number of rows that are checked at a time."""
_TYPES = {2: np.uint16, 4: np.int32}


class Stream(Protocol):
    """A stream of token ids, (tokens,): a tensor, or a file of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class TokenFile:
    """A stream of ids in a file. A slice of it is read from the file and returned as int64.

    The file is not mapped into memory: mapped pages count as the process's memory, and a pass over the text would map
    all of it. Nor does it stay open, because an open file can't be shared with the processes of a data loader.

    Args:
        path: the file.
        width: bytes per id, as :func:`width_of` returns it.
        length: number of ids.
    """

    path: Path
    width: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: slice) -> Tensor:
        start, stop, step = places.indices(self.length)
        if step != 1:
            raise ValueError(f"expected a slice without a step, got {step}")
        count = max(0, stop - start)
        found = np.fromfile(self.path, _TYPES[self.width], count, offset=start * self.width)
        if len(found) != count:
            raise OSError(f"{self.path} is shorter than it was; run the same command again")
        return torch.from_numpy(found.astype(np.int64))

    def counts(self, size: int) -> Tensor:
        """Return how often each of ``size`` ids occurs, (size,) int64.

        Raises:
            ValueError: if it holds anything else.
        """
        found = torch.zeros(size, dtype=torch.long)
        for start in range(0, self.length, BLOCK):
            block = self[start : start + BLOCK]
            check_that(int(block.min()) >= 0 and int(block.max()) < size, self.path.name, f"ids below {size}")
            found += torch.bincount(block, minlength=size)
        return found


def width_of(size: int) -> int:
    """Return the bytes per id of a vocabulary: 2 if all ids fit in them, else 4."""
    return 2 if size <= 1 << 16 else 4


def packed(ids: Sequence[int], width: int) -> bytes:
    """Return ids as the bytes of a :class:`TokenFile`."""
    return np.array(ids, _TYPES[width]).tobytes()


def open_stream(path: Path, width: int) -> TokenFile:
    """Open a whole file as a stream.

    Raises:
        ValueError: if its last id is cut.
    """
    length, more = divmod(path.stat().st_size, width)
    check_that(not more, path.name, f"ids of {width} bytes")
    return TokenFile(path, width, length)


@dataclass(frozen=True)
class RowFile:
    """Rows of ids, each in one or more parts, such as a line and its translation. Only their lengths are in memory.

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


def write_rows(folder: Path, name: str, width: int, rows: Iterable[Sequence[Sequence[int]]]) -> None:
    """Write rows, each a sequence of parts, to two files in a folder: their ids, and the lengths of their parts."""
    with (folder / f"{name}.ids").open("wb") as ids, (folder / f"{name}.lengths").open("wb") as lengths:
        for row in rows:
            ids.write(b"".join(packed(part, width) for part in row))
            lengths.write(packed([*map(len, row)], 4))


def open_rows(folder: Path, name: str, width: int, *parts: tuple[int, int]) -> RowFile:
    """Open the rows that :func:`write_rows` wrote, and check them.

    Args:
        folder: the folder.
        name: the name of their files.
        width: bytes per id.
        parts: of each part of a row, the least of its ids and what all are below.

    Raises:
        ValueError: if the lengths are not those of rows with these parts, or an id is another.
    """
    ids, numbers = (open_stream(folder / f"{name}.{kind}", size) for kind, size in (("ids", width), ("lengths", 4)))
    found = numbers[:]
    fits = len(found) % len(parts) == 0 and bool((found >= 0).all()) and int(found.sum()) == len(ids)
    check_that(fits, numbers.path.name, f"the lengths of {len(parts)} parts a row, of {len(ids)} ids in all")
    lengths = found.int().view(-1, len(parts))
    tokens = lengths.sum(1)
    rows = RowFile(ids, tokens.cumsum(0) - tokens, lengths)
    lows, highs = torch.tensor(parts).T
    for first in range(0, len(rows), LOT):
        some = lengths[first : first + LOT]
        start = int(rows.starts[first])
        block = ids[start : start + int(some.sum())]
        low, high = (bound.repeat(len(some)).repeat_interleave(some.flatten()) for bound in (lows, highs))
        check_that(bool(((low <= block) & (block < high)).all()), ids.path.name, f"ids from and below {parts}")
    return rows


def in_lots(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Yield the items in lists of ``count``; the last list may be shorter."""
    each = iter(items)
    while lot := list(islice(each, count)):
        yield lot
