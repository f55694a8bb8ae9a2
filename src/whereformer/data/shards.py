"""Encode something once, into files that grow by whole shards, and find the shards again after an interruption.

A folder holds the files, ``tokenizer.json`` if that was learned from the same text, and ``index.json``, which lists the
complete shards. A shard is a stretch of pages, pairs or rows. It is listed once the disk has it, so an interrupted
encoding continues after the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ..errors import InputError
from ..files import make_folder, write_atomically
from ..lab import ranks
from ..lab.folder import open_folder
from ..lab.json_files import from_json, read_json, write_json
from ..lab.progress import Progress
from .streams import Appended, checksum, in_lots

Item = TypeVar("Item")

FORMAT = 2
"""Format version of a folder. Another version's content is encoded again."""


@dataclass(frozen=True)
class Shard:
    """A stretch of the text: the number of its items, and for each file the size in bytes and the CRC-32."""

    items: int
    sizes: list[int]
    checksums: list[int]


@dataclass(frozen=True)
class Index:
    """What a folder holds so far.

    Args:
        tokenizer: hash of ``tokenizer.json``; None if there is none.
        shards: the complete shards, in order.
        facts: numbers about all of it; None until all is encoded.
        format: the format of the folder.
    """

    tokenizer: str | None
    shards: list[Shard] = field(default_factory=list)
    facts: dict[str, list[int]] | None = None
    format: int = FORMAT

    def size(self, place: int) -> int:
        """Return the bytes of the file at this place in the order of the files."""
        return sum(shard.sizes[place] for shard in self.shards)


@dataclass(frozen=True)
class Lots:
    """How much is done at a time: ``lot`` items are encoded by all processors, and ``shard`` items end a shard."""

    lot: int
    shard: int


@dataclass(frozen=True)
class Entry:
    """A folder of a cache, with what is encoded from one text in one way.

    Args:
        folder: the folder.
        names: the names of its files.
        private: whether no other process uses the folder.
    """

    folder: Path
    names: tuple[str, ...]
    private: bool = False

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that was learned from the text, if it was."""
        return self.folder / "tokenizer.json"

    def complete(self) -> Index | None:
        """Return the index if all is encoded and undamaged, else None. Every byte is checked."""
        index = self._load()
        if index is None or index.facts is None or self._intact(index.shards) < len(index.shards):
            return None
        return index

    def within(self, scratch: Path | None) -> Entry:
        """Return the same entry in a folder of this process alone; this entry itself if there is no such folder."""
        return self if scratch is None else replace(self, folder=scratch / self.folder.name, private=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep other commands from writing to it.

        Of several processes of a run, only the main one writes to a folder that they share.

        Raises:
            InputError: if it can't be written, another command is writing to it, or this process does not find there
                what the main process has written.
        """
        if self.private:
            make_folder(self.folder)
            yield
            return
        if not ranks.is_main():
            raise InputError(
                "cache", f"{self.folder} lacks what the main process has written to it; all machines have to share it"
            )
        try:
            lock = open_folder(self.folder)
        except InputError as error:
            raise InputError("cache", error.reason) from None
        with lock:
            yield

    def begin(self, progress: Progress, learn: Callable[[], str] | None = None) -> Index:
        """Return the index of the shards that an earlier encoding left intact, or begin with the tokenizer.

        Args:
            progress: is told what is there.
            learn: returns the tokenizer to save, as JSON; None if it is not learned from the text.
        """
        index = self._load()
        if index is None:
            if learn is not None:
                progress.begin("learning the vocabulary")
                write_atomically(self.tokenizer, learn())
            index = Index(None if learn is None else _hash(self.tokenizer.read_bytes()))
            self._save(index)
            return index
        intact = self._intact(index.shards)
        if intact < len(index.shards):
            progress.line(
                f"{self.folder} is damaged after {intact} of {len(index.shards)} shards; encoding the rest again"
            )
        elif intact:
            progress.line(f"continuing after encoded shard {intact} in {self.folder}")
        return Index(index.tokenizer, index.shards[:intact])

    def extend(
        self, index: Index, items: Iterable[Item], lots: Lots, write: Callable[[int, list[Item], list[Appended]], None]
    ) -> Index:
        """Encode the items that follow the shards that are there, and list each shard when the disk has it.

        Args:
            index: the shards that are there.
            items: all items, from the first.
            lots: how many items to encode at a time.
            write: encodes a lot of items, of which it gets the first one's number, and appends them to the files.
        """
        first = sum(shard.items for shard in index.shards)
        with ExitStack() as stack:
            files = [
                stack.enter_context(Appended(self.folder / name, index.size(place)))
                for place, name in enumerate(self.names)
            ]
            count = 0
            for lot in in_lots(islice(items, first, None), lots.lot):
                write(first, lot, files)
                first, count = first + len(lot), count + len(lot)
                if count >= lots.shard:
                    index, count = self._ended(index, files, count), 0
            return self._ended(index, files, count) if count else index

    def finish(self, index: Index, facts: dict[str, list[int]]) -> Index:
        """Record that all is encoded, with numbers about it."""
        index = replace(index, facts=facts)
        self._save(index)
        return index

    def drop(self) -> None:
        """Forget all shards."""
        (self.folder / "index.json").unlink()

    def _ended(self, index: Index, files: Sequence[Appended], count: int) -> Index:
        ended = [file.end_shard() for file in files]
        shard = Shard(count, [size for size, _ in ended], [crc for _, crc in ended])
        index = replace(index, shards=[*index.shards, shard])
        self._save(index)
        return index

    def _save(self, index: Index) -> None:
        """Write ``index.json``, with a hash of its own content."""
        content = asdict(index)
        write_json(self.folder / "index.json", {"hash": _hash(json.dumps(content).encode()), "index": content})

    def _load(self) -> Index | None:
        """Return the index, or None if there is none that fits the tokenizer beside it."""
        try:
            found = read_json(self.folder / "index.json")
            index = from_json(Index, found["index"])
            intact = found["hash"] == _hash(json.dumps(found["index"]).encode())
            fits = index.tokenizer is None or index.tokenizer == _hash(self.tokenizer.read_bytes())
            if intact and fits and index.format == FORMAT:
                return index
        except (OSError, ValueError, KeyError):
            pass
        return None

    def _intact(self, shards: Sequence[Shard]) -> int:
        """Return the number of shards before the first damaged one."""
        try:
            with ExitStack() as stack:
                files = [stack.enter_context((self.folder / name).open("rb")) for name in self.names]
                for count, shard in enumerate(shards):
                    found = [checksum(file, size) for file, size in zip(files, shard.sizes, strict=True)]
                    if found != shard.checksums:
                        return count
        except OSError:
            return 0
        return len(shards)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
