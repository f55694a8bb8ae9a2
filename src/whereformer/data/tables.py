"""Read the columns of CSV, TSV, JSON Lines and Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet
from pyarrow import json as json_lines

from ..errors import InputError, one_line

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
Columns = dict[str, list[Any]]


def read_table(field: str, file: Path, strings: Sequence[str] = ()) -> Columns:
    """Read a table as columns.

    Args:
        field: the argument that an error names.
        file: a file with one of the :data:`SUFFIXES`.
        strings: columns to read as text even if they look like numbers.

    Raises:
        InputError: if the file can't be read, or has two columns of the same name.
    """
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(field, f"expected a {', '.join(SUFFIXES)} file, got {str(file)!r}")
    if not file.is_file():
        raise InputError(field, f"no such file: {str(file)!r}")
    try:
        if suffix == ".parquet":
            table = parquet.read_table(file)
        elif suffix in (".jsonl", ".ndjson"):
            table = json_lines.read_json(file)
        else:
            table = csv.read_csv(
                file,
                parse_options=csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",", newlines_in_values=True),
                convert_options=csv.ConvertOptions(column_types={name: pa.string() for name in strings}),
            )
    except (pa.ArrowException, OSError, RecursionError, OverflowError) as error:
        raise InputError(field, f"cannot read {file} ({(str(error).splitlines() or ['damaged'])[0]})") from None
    try:
        names = table.column_names
        columns = columns_of(table) if len(set(names)) == len(names) else {}
    except UnicodeDecodeError as error:
        # pyarrow does not check that names of columns, and the text in JSON and Parquet, are UTF-8.
        raise InputError(field, f"{file} is not UTF-8 text: {error.object[:40]!r} ({error.reason})") from None
    except (pa.ArrowException, ValueError, OverflowError) as error:
        # Dates and durations that Python cannot express.
        raise InputError(field, f"{file} has values that can't be read ({one_line(str(error))})") from None
    for name in names:
        if names.count(name) > 1:
            raise InputError(field, f"{file} has more than one column {name!r}")
    return columns


def columns_of(table: pa.Table) -> Columns:
    """Convert a table to lists, one per column."""
    return {name: table[name].to_pylist() for name in table.column_names}
