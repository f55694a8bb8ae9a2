"""Read the documents of text, JSON Lines and Parquet files a part at a time, so that no file has to fit in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import InputError, one_line

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
TABLE_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
BLOCK = 1 << 20
"""Number of bytes of a text file that are read at a time."""
ROWS = 64
"""Number of rows of a Parquet file that are converted at a time."""

Document = Iterable[str]
"""A document as parts of its text, in order. The parts are read before the next document is asked for."""


def documents_in(file: Path, column: str | None = None) -> Iterator[Document]:
    """Yield the documents of a file that hold text.

    Args:
        file: a text file is one document; a table has one document per row. A file with an unknown suffix is text.
        column: the text column of a table; by default "text", or the only column of strings.

    Raises:
        InputError: if the file can't be read or is not what its suffix says; the message names the file.
    """
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        documents: Iterable[Document] = ([row] for row in _parquet(file, column))
    elif suffix in TABLE_SUFFIXES:
        documents = ([row] for row in _json_lines(file, column))
    else:
        documents = [_text(file)]
    for document in documents:
        begun = _begun(document)
        if begun is not None:
            yield begun


def _begun(document: Document) -> Document | None:
    """Return the document, or None if it is empty or blank; a long document is read only up to its first text."""
    parts = iter(document)
    blank: list[str] = []
    for part in parts:
        if part.strip():
            return chain(blank, [part], parts)
        blank.append(part)
    return None


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Name the file in the errors of the operating system."""
    try:
        yield
    except OSError as error:
        raise InputError("data", f"cannot read {file}: {error.strerror or error}") from None


def _not_utf8(file: Path, error: UnicodeDecodeError, before: int = 0) -> InputError:
    return InputError("data", f"{file} is not UTF-8 text (byte {before + error.start}: {error.reason})")


def _text(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read = 0
    with _reading(file), file.open("rb") as data:
        while True:
            block = data.read(BLOCK)
            if b"\0" in block:
                raise InputError("data", f"{file} is a binary file, expected UTF-8 text")
            try:
                # Half a character at the end of a block waits for the next one.
                pending = len(decoder.getstate()[0])
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(file, error, read - pending) from None
            if not block:
                return
            read += len(block)


def _json_lines(file: Path, column: str | None) -> Iterator[str]:
    name = _json_column(file, column)
    for row in _json_rows(file):
        value = row.get(name or "")
        if isinstance(value, str):
            # JSON allows half a surrogate pair; nothing else does.
            yield value.encode("utf-8", "replace").decode()


def _json_column(file: Path, column: str | None) -> str | None:
    """Return the name of the text column; None if there are no rows. Usually the first row tells."""
    strings: dict[str, None] = {}
    rows = 0
    for rows, row in enumerate(_json_rows(file), 1):  # noqa: B007
        strings |= {name: None for name, value in row.items() if isinstance(value, str)}
        if (column or "text") in strings:
            break
    return pick_column(list(strings), column, str(file)) if rows else None


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    read = 0
    with _reading(file), file.open("rb") as lines:
        # Only a line feed ends a line; JSON strings may contain other separators unescaped.
        for number, data in enumerate(lines, 1):
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(file, error, read) from None
            read += len(data)
            if line.strip():
                yield _json_row(file, number, line)


def _json_row(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits and lists in lists in lists are JSON, but nothing to train on.
        raise InputError("data", f"{file}, line {number}: not JSON ({getattr(error, 'msg', error)})") from None
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, dict):
        raise InputError("data", f"{file}, line {number}: expected an object or a string, got {line[:40].rstrip()!r}")
    return row


def _parquet(file: Path, column: str | None) -> Iterator[str]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with _reading(file), parquet.ParquetFile(file) as table:
            strings = [
                field.name
                for field in table.schema_arrow
                if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
            ]
            name = pick_column(strings, column, str(file))
            for batch in table.iter_batches(ROWS, columns=[name]):
                yield from (value for value in batch[name].to_pylist() if value)
    except pa.ArrowException as error:
        raise InputError("data", f"{file} is not a Parquet file ({one_line(str(error))})") from None
    except UnicodeDecodeError as error:
        # pyarrow does not check that text is UTF-8.
        raise InputError("data", f"{file} is not UTF-8 text: {error.object[:40]!r} ({error.reason})") from None


def pick_column(strings: Sequence[str], column: str | None, where: str) -> str:
    """Return the name of the column to read."""
    if column is None:
        if "text" in strings:
            return "text"
        if len(strings) == 1:
            return strings[0]
        columns = ", ".join(strings) or "none"
        raise InputError("data", f"{where}: which column is the text? name one with `column` (strings: {columns})")
    if column not in strings:
        raise InputError("column", f"{where} has no string column {column!r}; it has {', '.join(strings) or 'none'}")
    return column
