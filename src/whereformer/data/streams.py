"""Token ids in files: they are written once, and read a window at a time, so that no stream has to fit in memory."""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..files import naming

Item = TypeVar("Item")

BLOCK = 1 << 20
"""Number of tokens that are read at a time when a whole stream is read."""


class Stream(Protocol):
    """A stream of token ids, (tokens,): a tensor, or a file of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class TokenFile:
    """A stream of ids in a file. A slice of it is read from the file and returned as int64.

    The file is not mapped into memory: mapped pages count as the process's memory, and a pass over the text would map
    all of it.

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
        # Opened for each read: a file that stays open can't be shared with the processes of a data loader.
        with self.path.open("rb", buffering=0) as file:
            file.seek(start * self.width)
            data = bytearray(file.read(max(0, stop - start) * self.width))
        if len(data) != max(0, stop - start) * self.width:
            raise OSError(f"{self.path} is shorter than it was; run the same command again")
        return torch.frombuffer(data, dtype=_DTYPES[self.width]).long() if data else torch.zeros(0, dtype=torch.long)

    def counts(self, size: int) -> Tensor:
        """Return how often each of ``size`` ids occurs, (size,) int64."""
        found = torch.zeros(size, dtype=torch.long)
        for start in range(0, self.length, BLOCK):
            found += torch.bincount(self[start : start + BLOCK], minlength=size)
        return found

    def largest(self) -> int:
        """Return the largest id, or -1 if there is none."""
        starts = range(0, self.length, BLOCK)
        return max((int(self[start : start + BLOCK].max()) for start in starts), default=-1)


_DTYPES = {2: torch.uint16, 4: torch.int32}
_CODES = {2: "H", 4: "i"}


def width_of(size: int) -> int:
    """Return the bytes per id of a vocabulary: 2 if all ids fit in them, else 4."""
    return 2 if size <= 1 << 16 else 4


def packed(ids: Iterable[int], width: int) -> bytes:
    """Return ids as the bytes of a :class:`TokenFile`."""
    return array(_CODES[width], ids).tobytes()


def checksum(file: BinaryIO, count: int) -> int | None:
    """Return the CRC-32 of the next ``count`` bytes of a file, or None if it has fewer."""
    found = 0
    while count:
        block = file.read(min(count, BLOCK))
        if not block:
            return None
        found = zlib.crc32(block, found)
        count -= len(block)
    return found


class Appended:
    """A file that grows by whole shards. A shard counts from when the disk has it; see :meth:`end_shard`.

    Args:
        path: the file. It is created if it is missing.
        size: the bytes of it to keep; what follows them is dropped.

    Raises:
        InputError: if the file can't be written; every method may raise it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size, self.crc = 0, 0
        with self._writing():
            self.file = path.open("ab")
            self.file.truncate(size)

    def write(self, data: bytes) -> None:
        """Append to the current shard."""
        with self._writing():
            self.file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def end_shard(self) -> tuple[int, int]:
        """Wait until the disk has the shard, and return its size in bytes and its CRC-32."""
        with self._writing():
            self.file.flush()
            os.fsync(self.file.fileno())
        found = self.size, self.crc
        self.size, self.crc = 0, 0
        return found

    def __enter__(self) -> Appended:
        return self

    def __exit__(self, *_: object) -> None:
        # What is left in the buffer belongs to no shard.
        with suppress(OSError):
            self.file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Name the file in the errors of the operating system."""
        try:
            with naming(self.path):
                yield
        except OSError as error:
            raise InputError("cache", f"cannot write {self.path}: {error.strerror or error}") from None


def in_lots(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Yield the items in lists of ``count``; the last list may be shorter."""
    lot: list[Item] = []
    for item in items:
        lot.append(item)
        if len(lot) == count:
            yield lot
            lot = []
    if lot:
        yield lot
