"""Read the columns of CSV, TSV, JSON Lines and Parquet files, all at once or some rows at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet
from pyarrow import json as json_lines

from ..errors import InputError, one_line, shown
from .lines import read_lines

JSON = (".jsonl", ".ndjson")
SUFFIXES = (".csv", ".tsv", *JSON, ".parquet")
Columns = dict[str, list[Any]]
ROWS = 1024
"""Number of rows of a Parquet file that are converted at a time."""


def read_table(field: str, file: Path, strings: Sequence[str] = ()) -> Columns:
    """Read a table as columns.

    Args:
        field: the argument that an error names.
        file: a file with one of the :data:`SUFFIXES`.
        strings: columns to read as text even if they look like numbers.

    Raises:
        InputError: if the file can't be read, or has two columns of the same name.
    """
    check_table(field, file)
    suffix = file.suffix.lower()
    with _reading(field, file):
        if suffix == ".parquet":
            table = parquet.read_table(file)
        elif suffix in JSON:
            table = json_lines.read_json(file)
        else:
            types = {name: pa.string() for name in strings}
            table = csv.read_csv(
                file, parse_options=_cells(file), convert_options=csv.ConvertOptions(column_types=types)
            )
    check_once(field, file, table.column_names)
    return _converted(field, file, table, table.column_names)


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
    except (pa.ArrowException, OSError, RecursionError, OverflowError) as error:
        raise InputError(field, f"cannot read {file} ({(str(error).splitlines() or ['damaged'])[0]})") from None


def _converted(field: str, file: Path, table: pa.Table | pa.RecordBatch, names: Sequence[str]) -> Columns:
    try:
        return {name: table[name].to_pylist() for name in names}
    except UnicodeDecodeError as error:
        # pyarrow does not check that the text in JSON and Parquet is UTF-8.
        raise InputError(field, f"{file} is not UTF-8 text: {error.object[:40]!r} ({error.reason})") from None
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


def columns_of(table: pa.Table) -> Columns:
    """Convert a table to lists, one per column."""
    return {name: table[name].to_pylist() for name in table.column_names}
