"""Read the columns of CSV, TSV, JSON Lines and Parquet files, all at once or some rows at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import csv, parquet

from ..errors import InputError, one_line, shown
from .lines import read_lines

JSON = (".jsonl", ".ndjson")
SUFFIXES = (".csv", ".tsv", *JSON, ".parquet")
Columns = dict[str, list[Any]]
ROWS = 1024
"""Number of rows of a Parquet file that are converted at a time."""


def read_batches(
    field: str, file: Path, pick: Callable[[Sequence[str]], Sequence[str]], strings: Sequence[str] = ()
) -> Iterator[Columns]:
    """Read some columns of a CSV, TSV or Parquet file, some rows at a time.

    Args:
        field: the argument that an error names.
        file: the file.
        pick: returns the columns to read from the names of all.
        strings: columns to read as text even if they look like numbers. The first million bytes of a CSV or TSV file
            tell what the other columns are.

    Raises:
        InputError: if the file can't be read, or has two columns of the same name.
    """
    check_table(field, file)
    with _reading(field, file):
        if file.suffix.lower() == ".parquet":
            with parquet.ParquetFile(file) as table:
                names = table.schema_arrow.names
                check_once(field, file, names)
                chosen = list(pick(names))
                for batch in table.iter_batches(ROWS, columns=chosen):
                    yield _converted(field, file, batch, chosen)
            return
        with csv.open_csv(file, parse_options=_cells(file)) as first:
            schema = first.schema
        check_once(field, file, schema.names)
        chosen = list(pick(schema.names))
        # A column that begins with empty cells is text, too.
        text = {name for name in chosen if name in strings or pa.types.is_null(schema.field(name).type)}
        options = csv.ConvertOptions(column_types=dict.fromkeys(text, pa.string()), include_columns=chosen)
        with csv.open_csv(file, parse_options=_cells(file), convert_options=options) as rows:
            for batch in rows:
                yield _converted(field, file, batch, chosen)


def json_rows(field: str, file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON Lines file, an object per line.

    Raises:
        InputError: if the file can't be read, or a line holds something else; the message names the line.
    """
    check_table(field, file)
    for number, line in enumerate(read_lines(field, file), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Numbers of thousands of digits and lists in lists in lists are JSON, but nothing to train on.
            reason = f"not JSON: {getattr(error, 'msg', error)}"
        else:
            reason = f"expected an object, got {shown(row, 40)}"
            if isinstance(row, dict):
                yield row
                continue
        raise InputError(field, f"cannot read {file} (line {number}: {reason})")


class Table(Protocol):
    """A table that is read anew in every pass, some rows at a time."""

    @property
    def field(self) -> str:
        """The argument that errors about it name."""

    @property
    def names(self) -> list[str]:
        """The names of its columns."""

    def column(self, name: str) -> list[Any]:
        """Return all of a column."""

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of each row."""

    def unchanged(self) -> bool:
        """Return whether the table is still what it was when it was opened."""


@dataclass(frozen=True)
class TableFile:
    """A table in a file, which :func:`open_table` opens.

    Args:
        field: the argument that an error names.
        file: the file.
        strings: columns to read as text even if they look like numbers.
        stamp: the file's size and time of change (ns) when it was opened.
    """

    field: str
    file: Path
    strings: tuple[str, ...]
    stamp: tuple[int, int]

    @cached_property
    def names(self) -> list[str]:
        """The names of its columns."""
        if self._is_json:
            found: dict[str, None] = {}
            for row in json_rows(self.field, self.file):
                found.update(dict.fromkeys(row))
            return list(found)
        with _reading(self.field, self.file):
            if self.file.suffix.lower() == ".parquet":
                names: list[str] = parquet.read_schema(self.file).names
            else:
                with csv.open_csv(self.file, parse_options=_cells(self.file)) as first:
                    names = first.schema.names
        check_once(self.field, self.file, names)
        return names

    def column(self, name: str) -> list[Any]:
        """Return all of a column, with the type that all of it has."""
        if self._is_json:
            values = [whole(row.get(name)) for row in json_rows(self.field, self.file)]
            if any(isinstance(value, float) for value in values):
                most = sys.float_info.max
                return [float(value) if type(value) is int and abs(value) <= most else value for value in values]
            return values
        with _reading(self.field, self.file):
            if self.file.suffix.lower() == ".parquet":
                table = parquet.read_table(self.file, columns=[name])
            else:
                types = dict.fromkeys(self.strings, pa.string())
                options = csv.ConvertOptions(column_types=types, include_columns=[name])
                table = csv.read_csv(self.file, parse_options=_cells(self.file), convert_options=options)
        return _converted(self.field, self.file, table, [name])[name]

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of each row. Those of CSV and TSV files that are not ``strings`` may be refused."""
        if self._is_json:
            for row in json_rows(self.field, self.file):
                yield tuple(whole(row.get(name)) for name in names)
            return
        for batch in read_batches(self.field, self.file, lambda found: list(dict.fromkeys(names)), self.strings):
            yield from zip(*(batch[name] for name in names), strict=True)

    def unchanged(self) -> bool:
        """Return whether the file has the size and the time of change that it had."""
        return _stamp(self.field, self.file) == self.stamp

    @property
    def _is_json(self) -> bool:
        return self.file.suffix.lower() in JSON


def open_table(field: str, file: Path, strings: Sequence[str] = ()) -> TableFile:
    """Open a table.

    Args:
        field: the argument that an error names.
        file: a file with one of the :data:`SUFFIXES`.
        strings: columns to read as text even if they look like numbers.

    Raises:
        InputError: if there is no such file; when it is read, if it can't be, or has two columns of the same name.
    """
    check_table(field, file)
    return TableFile(field, file, tuple(strings), _stamp(field, file))


def _stamp(field: str, file: Path) -> tuple[int, int]:
    with _reading(field, file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns


def whole(cell: Any) -> Any:
    """Return text without halves of surrogate pairs, which JSON allows and nothing else does."""
    return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell


def check_table(field: str, file: Path) -> None:
    """Check that there is a file, with one of the :data:`SUFFIXES`.

    Raises:
        InputError: if there is not.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise InputError(field, f"expected a {', '.join(SUFFIXES)} file, got {str(file)!r}")
    if not file.is_file():
        raise InputError(field, f"no such file: {str(file)!r}")


def _cells(file: Path) -> csv.ParseOptions:
    return csv.ParseOptions(delimiter="\t" if file.suffix.lower() == ".tsv" else ",", newlines_in_values=True)


@contextmanager
def _reading(field: str, file: Path) -> Iterator[None]:
    """Name the file in the errors of pyarrow."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise _not_utf8(field, file, error) from None
    except (pa.ArrowException, OSError, RecursionError, OverflowError) as error:
        raise InputError(field, f"cannot read {file} ({(str(error).splitlines() or ['damaged'])[0]})") from None


def _not_utf8(field: str, file: Path, error: UnicodeDecodeError) -> InputError:
    """Return the error for text that pyarrow does not check: the names of columns, and cells of Parquet files."""
    return InputError(field, f"{file} is not UTF-8 text: {error.object[:40]!r} ({error.reason})")


def _converted(field: str, file: Path, table: pa.Table | pa.RecordBatch, names: Sequence[str]) -> Columns:
    try:
        return {name: table[name].to_pylist() for name in names}
    except UnicodeDecodeError as error:
        raise _not_utf8(field, file, error) from None
    except (pa.ArrowException, ValueError, OverflowError) as error:
        # Dates and durations that Python cannot express.
        raise InputError(field, f"{file} has values that can't be read ({one_line(str(error))})") from None


def check_once(field: str, file: Path, names: Sequence[str]) -> None:
    """Check that no two columns have the same name.

    Raises:
        InputError: if two have.
    """
    for name in names:
        if names.count(name) > 1:
            raise InputError(field, f"{file} has more than one column {name!r}")
