"""Read the lines of UTF-8 text files, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import InputError


def read_lines(field: str, file: Path) -> Iterator[str]:
    """Yield the lines of a text file, without line ends.

    Only a line feed ends a line, because other separators may occur within a sentence.

    Raises:
        InputError: if the file can't be read or is not UTF-8; the message names the line.
    """
    try:
        with file.open("rb") as data:
            yield from lines_of(field, str(file), data)
    except OSError as error:
        raise InputError(field, f"cannot read {str(file)!r}: {error.strerror or error}") from None


def lines_of(field: str, name: str, data: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-8 stream, without line ends.

    Args:
        field: the argument that an error names.
        name: the file that an error names.
        data: its lines, as a binary stream gives them.

    Raises:
        InputError: if a line is not UTF-8; it names the line.
    """
    for number, line in enumerate(data, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            # The decoder does not count a byte order mark at the beginning.
            mark = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
            place = error.start + mark + 1
            raise InputError(
                field, f"{name}, line {number}: not UTF-8 text (byte {place} of the line: {error.reason})"
            ) from None
        if text:  # not a mark alone
            yield text.removesuffix("\n").removesuffix("\r")
