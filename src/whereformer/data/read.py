"""Read text, CSV, TSV, JSON Lines and Parquet files a part at a time, so that no file has to fit in memory."""

from __future__ import annotations

import codecs
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from ..errors import LONGEST_NAME, InputError, one_line, shown, some_of
from ..files import check_regular

JSON = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
TABLE_SUFFIXES = (".parquet", *JSON, ".arrow")
"""Tables of text to train on: a row is a document. Arrow files are those of data sets that are downloaded."""
SUFFIXES = (".csv", ".tsv", *JSON, ".parquet")
"""Tables of labeled rows and of pairs."""
BLOCK = 1 << 20
"""Number of bytes of a text file that are read at a time."""
ROWS = 64
"""Number of rows of a Parquet file that are converted at a time. A row may be a whole book."""

MOST_CELL = 1 << 24
"""The most characters of a cell. A tokenizer takes twenty times as many bytes for them, however few tokens are kept."""

Document = Iterable[str]
"""A document as parts of its text, in order. The parts are read before the next document is asked for."""


@contextmanager
def reading(field: str, file: Path) -> Iterator[None]:
    """Name the file in the errors of the operating system and of pyarrow."""
    try:
        yield
    except InputError:
        raise
    except UnicodeDecodeError as error:
        # pyarrow does not check the names of columns, nor the cells of Parquet files.
        raise InputError(field, f"{file} is not UTF-8 text: {error.object[:40]!r} ({error.reason})") from None
    except (pa.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        # Dates and durations that Python cannot express are ValueErrors. Some errors of pyarrow quote whole rows.
        reason = getattr(error, "strerror", None) or one_line(str(error))[:200] or "damaged"
        if "straddl" in reason:
            reason = f"a row has more than {BLOCK:,} bytes; use a .jsonl or .parquet file"
        raise InputError(field, f"cannot read {shown(str(file), LONGEST_NAME)}: {reason}") from None


# --- lines and JSON Lines


def read_lines(field: str, file: Path) -> Iterator[str]:
    """Yield the lines of a text file, without line ends.

    Only a line feed ends a line, because other separators may occur within a sentence.

    Raises:
        InputError: if the file can't be read or is not UTF-8; the message names the line.
    """
    with reading(field, file), file.open("rb") as data:
        yield from lines_of(field, str(file), data)


def lines_of(field: str | None, name: str, data: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-8 stream, as :func:`read_lines` does; ``name`` is what errors call it."""
    for number, line in enumerate(data, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            # The decoder does not count a byte order mark at the beginning.
            mark = 3 if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
            place = f"byte {error.start + mark + 1} of the line: {error.reason}"
            raise InputError(field, f"{name}, line {number}: not UTF-8 text ({place})") from None
        if text:  # not a mark alone
            yield text.removesuffix("\n").removesuffix("\r")


def json_rows(field: str, file: Path, *, strings: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON Lines file, an object per line. With ``strings``, a string is a row's "text".

    Raises:
        InputError: if the file can't be read, or a line holds something else; the message names the line.
    """
    for number, line in enumerate(read_lines(field, file), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Numbers of thousands of digits and lists in lists in lists are JSON, but nothing to train on.
            raise InputError(field, f"{file}, line {number}: not JSON ({getattr(error, 'msg', error)})") from None
        if strings and isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            expected = "an object or a string" if strings else "an object"
            raise InputError(field, f"{file}, line {number}: expected {expected}, got {shown(row, 40)}")
        _check_cells(field, f"{file}, line {number}", row.items())
        yield row


def _check_cells(field: str, row: str, cells: Iterable[tuple[str, Any]]) -> None:
    """Raise an InputError, which names the row, for a cell with too much text."""
    for name, cell in cells:
        if isinstance(cell, str) and len(cell) > MOST_CELL:
            told = f"expected at most {MOST_CELL:,} characters in a cell, got {len(cell):,}"
            raise InputError(field, f"{row}, {shown(name)}: {told}")


def _whole(cell: Any) -> Any:
    """Return text without halves of surrogate pairs, which JSON allows and nothing else does."""
    return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell


# --- tables


@dataclass(frozen=True)
class TableFile:
    """A table in a file, which :func:`open_table` opens. It is read anew in every pass, some rows at a time.

    Args:
        field: the argument that an error names.
        file: the file.
        strings: columns to read as text even if they look like numbers.
    """

    field: str
    file: Path
    strings: tuple[str, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        """The names of its columns. Those of JSON Lines are known only at the end of the file."""
        if self._suffix not in JSON:
            return list(self.schema.names)
        return list(dict.fromkeys(name for row in json_rows(self.field, self.file) for name in row))

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of a table that is not in JSON. Those of CSV and TSV follow from the first million bytes."""
        with reading(self.field, self.file):
            if self._suffix == ".parquet":
                found = parquet.read_schema(self.file)
            elif self._suffix == ".arrow":
                with pa.ipc.open_stream(str(self.file)) as first:
                    found = first.schema
            else:
                with csv.open_csv(self.file, parse_options=self._cells) as first:
                    found = first.schema
            check_once(self.field, self.file, found.names)
        return found

    def column(self, name: str) -> list[Any]:
        """Return all of a column, with the type that all of it has."""
        if self._suffix in (".csv", ".tsv"):
            types = dict.fromkeys(self.strings, pa.string())
            options = csv.ConvertOptions(column_types=types, include_columns=[name])
            with reading(self.field, self.file):
                table = csv.read_csv(self.file, parse_options=self._cells, convert_options=options)
                return table[name].to_pylist()
        values = [value for (value,) in self.rows([name])]
        if any(isinstance(value, float) for value in values):
            most = sys.float_info.max
            return [float(value) if type(value) is int and abs(value) <= most else value for value in values]
        return values

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of each row. Those of CSV and TSV files that are not ``strings`` may be refused.

        Raises:
            InputError: if the file can't be read, or a cell has too much text.
        """
        for number, row in enumerate(self._rows(names)):
            _check_cells(self.field, f"{self.file}, row {number}", zip(names, row, strict=True))
            yield row

    def _rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        if self._suffix in JSON:
            for row in json_rows(self.field, self.file):
                yield tuple(_whole(row.get(name)) for name in names)
            return
        with reading(self.field, self.file):
            for batch in self._batches(list(dict.fromkeys(names))):
                yield from zip(*(batch[name].to_pylist() for name in names), strict=True)

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        if self._suffix == ".arrow":
            with pa.memory_map(str(self.file)) as data:
                for batch in pa.ipc.open_stream(data):
                    yield from (batch.slice(start, ROWS) for start in range(0, len(batch), ROWS))
            return
        if self._suffix == ".parquet":
            with parquet.ParquetFile(self.file) as table:
                yield from table.iter_batches(ROWS, columns=names)
            return
        # A column that begins with empty cells is text, too.
        text = [name for name in names if name in self.strings or pa.types.is_null(self.schema.field(name).type)]
        options = csv.ConvertOptions(column_types=dict.fromkeys(text, pa.string()), include_columns=names)
        with csv.open_csv(self.file, parse_options=self._cells, convert_options=options) as rows:
            yield from rows

    @property
    def _suffix(self) -> str:
        return self.file.suffix.lower()

    @property
    def _cells(self) -> csv.ParseOptions:
        return csv.ParseOptions(delimiter="\t" if self._suffix == ".tsv" else ",", newlines_in_values=True)


def open_table(field: str, file: Path, strings: Sequence[str] = ()) -> TableFile:
    """Open a table.

    Args:
        field: the argument that an error names.
        file: a file with one of the :data:`SUFFIXES`.
        strings: columns to read as text even if they look like numbers.

    Raises:
        InputError: if there is no such file; when it is read, if it can't be, or has two columns of the same name.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise InputError(field, f"expected a {', '.join(SUFFIXES)} file, got {shown(str(file), LONGEST_NAME)}")
    check_regular(field, file)
    return TableFile(field, file, tuple(strings))


def check_once(field: str, file: Path, names: Sequence[str]) -> None:
    """Check that no two columns have the same name.

    Raises:
        InputError: if two have.
    """
    [(name, count), *_] = Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise InputError(field, f"{file} has more than one column {shown(name)}")


# --- documents


def documents_in(file: Path, column: str | None = None) -> Iterator[Document]:
    """Yield the documents of a file that hold text.

    Args:
        file: a text file is one document; a table has one document per row. A file with an unknown suffix is text.
        column: the text column of a table; by default "text", or the only column of strings.

    Raises:
        InputError: if the file can't be read or is not what its suffix says; the message names the file.
    """
    if file.suffix.lower() in TABLE_SUFFIXES:
        yield from ([cell] for cell in _cells_of(file, column) if cell.strip())
        return
    parts = _text(file)
    blank: list[str] = []
    for part in parts:
        if part.strip():
            yield chain(blank, [part], parts)
            return
        blank.append(part)


def _text(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read = 0
    with reading("data", file), file.open("rb") as data:
        while True:
            block = data.read(BLOCK)
            if b"\0" in block:
                raise InputError("data", f"{file} is a binary file, expected UTF-8 text")
            # Half a character at the end of a block waits for the next one.
            before = read - len(decoder.getstate()[0])
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = f"byte {before + error.start}: {error.reason}"
                raise InputError("data", f"{file} is not UTF-8 text ({place})") from None
            if not block:
                return
            read += len(block)


def _cells_of(file: Path, column: str | None) -> Iterator[str]:
    """Yield the text column of a table, without what is not text."""
    if file.suffix.lower() not in JSON:
        table = TableFile("data", file)
        kinds = (pa.types.is_string, pa.types.is_large_string)
        strings = [each.name for each in table.schema if any(kind(each.type) for kind in kinds)]
        cells = (cell for (cell,) in table.rows([pick_column(strings, column, str(file))]))
    else:
        name = _json_column(file, column)
        cells = (_whole(row.get(name or "")) for row in json_rows("data", file, strings=True))
    yield from (cell for cell in cells if isinstance(cell, str))


def _json_column(file: Path, column: str | None) -> str | None:
    """Return the name of the text column; None if there are no rows. Usually the first row tells."""
    strings: dict[str, None] = {}
    row = None
    for row in json_rows("data", file, strings=True):
        strings |= {name: None for name, value in row.items() if isinstance(value, str)}
        if (column or "text") in strings:
            break
    return None if row is None else pick_column(list(strings), column, str(file))


def pick_column(strings: Sequence[str], column: str | None, where: str) -> str:
    """Return the name of the column to read.

    Args:
        strings: the columns of strings.
        column: the one that was asked for; None means "text", or the only one.
        where: the table, for errors.

    Raises:
        InputError: if there is no such column, or it is not clear which one is meant.
    """
    if column is None:
        if "text" in strings:
            return "text"
        if len(strings) == 1:
            return strings[0]
        told = f"{where}: which column is the text? name one with `column` (strings: {some_of(strings)})"
        raise InputError("data", told)
    if column not in strings:
        raise InputError("column", f"{where} has no string column {shown(column)}; it has {some_of(strings)}")
    return column
