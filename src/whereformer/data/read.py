"""Read text files and tables (CSV, TSV, JSON Lines, Parquet, Arrow) a part at a time: no file has to fit in memory."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, dropwhile
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa
from pyarrow import parquet

from ..errors import MAX_NAME, InputError, list_some, one_line, short_repr
from ..files import check_regular

Line = TypeVar("Line", str, bytes)

JSON = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", *JSON, ".parquet", ".arrow")
"""Files with these suffixes are tables. The library ``datasets`` keeps loaded data sets in Arrow files."""
BLOCK_CHARACTERS = 1 << 20
"""The number of characters of a text file that are read at a time."""
MAX_ROWS = 64
"""The largest number of rows of a Parquet file that are read at a time. A row may be a whole book."""
MAX_BATCH_BYTES = 1 << 30
"""The limit, in bytes, of rows that are read at a time, where each is taken to be as long as its group."""
MAX_CELL = 1 << 24
"""The largest number of characters in a cell. A tokenizer needs twenty bytes for each, even if few tokens are kept."""
MAX_LINE = 1 << 27
"""The largest number of characters in a line; a file without line ends could be larger than memory."""
HUB = "hub:"
"""The prefix of data sets on the Hugging Face Hub."""

NOT_TEXT = {
    b"\x1f\x8b": "is compressed; gunzip unpacks it",
    b"%PDF": "is a PDF; save it as plain text, as pdftotext does",
    b"PK\x03\x04": "is a ZIP archive, as .docx files are; unpack it, or save the document as plain text",
    b"\xff\xfe": "is UTF-16 text; iconv -f UTF-16 -t UTF-8 converts it",
    b"\xfe\xff": "is UTF-16 text; iconv -f UTF-16 -t UTF-8 converts it",
}
"""The first bytes of files that are often passed as text, and what to do with them."""

Document = Iterable[str]
"""A document as parts of its text, in order. The parts must be read before the next document."""


@contextmanager
def name_file(field: str, file: Path) -> Iterator[None]:
    """Name the file in the errors of the operating system, of pyarrow and of Python's readers."""
    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, csv.Error, OSError, ValueError, OverflowError, RecursionError) as error:
        # Dates and durations that Python cannot express are ValueErrors. Some errors of pyarrow quote whole rows.
        reason = getattr(error, "strerror", None) or one_line(str(error))[:200] or "damaged"
        if isinstance(error, UnicodeDecodeError) and file.suffix.lower() not in (".parquet", ".arrow"):
            reason = "not UTF-8 text; iconv -f LATIN1 -t UTF-8 converts Latin-1"
        raise InputError(field, f"cannot read {short_repr(str(file), MAX_NAME)}: {reason}") from None


def read_lines(field: str, file: Path) -> Iterator[str]:
    """Yield the lines of a text file, without line ends. If it can't be read or is not UTF-8, raise an InputError.

    Only a line feed ends a line, because other separators may occur within a sentence.
    """
    with name_file(field, file), file.open("rb") as data:
        yield from decode_lines(field, str(file), data)


def decode_lines(field: str | None, name: str, data: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-8 stream, as :func:`read_lines` does; errors call the stream ``name``."""
    for number, line in enumerate(_lines(field, name, data), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(field, f"{name}, line {number}: not UTF-8 text ({error.reason})") from None
        if text:  # more than a byte order mark
            yield text.removesuffix("\n").removesuffix("\r")


def _lines(field: str | None, name: str, data: IO[Line]) -> Iterator[Line]:
    """Yield lines with their ends, and refuse one that is too long."""
    while line := data.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise InputError(field, f"{name}: a line has {MAX_LINE:,} characters or more")
        yield line


@dataclass(frozen=True)
class Table:
    """A table in a file. Each pass reads the file again, some rows at a time.

    Cells of CSV and TSV files are text; in files of the other kinds, cells have the types that the file declares.

    Raises:
        InputError: if the file does not exist, or is not one of the :data:`TABLES`.
    """

    field: str  # the argument that an error names
    file: Path
    quotes: bool = True  # whether quotation marks enclose cells of CSV and TSV files, or are text

    def __post_init__(self) -> None:
        if self._kind not in TABLES:
            name = short_repr(str(self.file), MAX_NAME)
            raise InputError(self.field, f"expected a {', '.join(TABLES[:-1])} file, got {name}")
        check_regular(self.field, self.file)

    @cached_property
    def names(self) -> list[str]:
        """The names of its columns; in JSON Lines, the names in the first row that has any.

        In CSV and TSV files, a column whose cell in the first row is empty has no name, and cannot be read.
        """
        if self._kind in JSON:
            return list(next(filter(None, self._objects()), {}))
        if self._kind in (".csv", ".tsv"):
            with self._csv() as table:
                return [name for name in table.fieldnames or [] if name.strip()]
        with name_file(self.field, self.file):
            if self._kind == ".parquet":
                return list(parquet.read_schema(self.file).names)
            with pa.ipc.open_stream(str(self.file)) as first:
                return list(first.schema.names)

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of each row. A cell that a row of JSON Lines lacks is None.

        Raises:
            InputError: if the file can't be read, lacks a column or has several of its name, or has too much text in a
                cell.
        """
        missing = [name for name in names if name not in self.names]
        if ambiguous := [name for name in names if self.names.count(name) > 1]:
            raise InputError(
                self.field, f"{self.file} has several columns named {short_repr(ambiguous[0])}; rename them"
            )
        if self._kind not in JSON:
            self._check_columns(missing)
        for number, row in enumerate(self._rows(names), 1):
            missing = [name for name in missing if name not in row]
            cells = tuple(row.get(name) for name in names)
            for name, cell in zip(names, cells, strict=True):
                if isinstance(cell, str) and len(cell) > MAX_CELL:
                    reason = f"expected at most {MAX_CELL:,} characters in a cell, got {len(cell):,}"
                    raise InputError(self.field, f"{self.file}, row {number}, {short_repr(name)}: {reason}")
            yield cells
        self._check_columns(missing)

    def _rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield each row as its cells by the names of columns: these, or all."""
        if self._kind in JSON:
            yield from self._objects()
        elif self._kind in (".csv", ".tsv"):
            with self._csv() as table:
                for row in table:
                    if None in row or any(row[name] is None for name in self.names):
                        line, count = f"{self.file}, line {table.line_num}", len(table.fieldnames or [])
                        raise InputError(self.field, f"{line}: expected {count} cells as in the first row")
                    yield row
        else:
            with name_file(self.field, self.file):
                for batch in self._batches(list(dict.fromkeys(names))):
                    # One at a time, so that one that is too long is not converted with many others.
                    columns = ((cell.as_py() for cell in batch[name]) for name in names)
                    yield from (dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True))

    def _check_columns(self, missing: Sequence[str]) -> None:
        if missing and self.names:  # a table without names has no rows either
            known = list_some(self.names)
            raise InputError(self.field, f"{self.file} has no column {short_repr(missing[0])}; name one of {known}")

    def _objects(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of JSON Lines, an object per line. A string is a row's "text"."""
        for number, line in enumerate(read_lines(self.field, self.file), 1):
            if not line.strip():
                continue
            line_name = f"{self.file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                # Numbers of thousands of digits and deeply nested lists are JSON, but cannot be trained on.
                raise InputError(self.field, f"{line_name}: not JSON ({getattr(error, 'msg', error)})") from None
            row = {"text": row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                raise InputError(self.field, f"{line_name}: expected an object or a string, got {short_repr(row, 40)}")
            yield {name: _without_surrogates(cell) for name, cell in row.items()}

    @contextmanager
    def _csv(self) -> Iterator[csv.DictReader[str]]:
        style: Any = {"delimiter": "\t"} if self._kind == ".tsv" else {}
        style["quoting"] = csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE
        with name_file(self.field, self.file), self.file.open(encoding="utf-8-sig", newline="") as file:
            lines = dropwhile(lambda line: not line.strip("\r\n"), _lines(self.field, str(self.file), file))
            yield csv.DictReader(lines, strict=True, **style)

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        if self._kind == ".parquet":
            with parquet.ParquetFile(self.file) as table:
                # However well a few cells compress, each is at most as long as its group.
                groups = (table.metadata.row_group(number) for number in range(table.num_row_groups))
                largest = max((group.total_byte_size for group in groups), default=0)
                yield from table.iter_batches(max(1, min(MAX_ROWS, MAX_BATCH_BYTES // max(1, largest))), columns=names)
        else:
            with pa.memory_map(str(self.file)) as data:
                for batch in pa.ipc.open_stream(data):
                    batch.validate(full=True)  # or offsets that lie would end this process
                    yield batch

    @property
    def _kind(self) -> str:
        return self.file.suffix.lower()


def _without_surrogates(cell: object) -> Any:
    """Return text without halves of surrogate pairs, which JSON allows and nothing else does."""
    return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell


def read_documents(file: Path, column: str | None = None) -> Iterator[Document]:
    """Yield the documents of a file that hold text.

    Args:
        file: a text file is one document; a table has one document per row. A file with an unknown suffix is text.
        column: the text column of a table; by default "text".

    Raises:
        InputError: if the file cannot be read, or its content does not match its suffix; the message names the file.
    """
    if file.suffix.lower() in TABLES:
        cells = chain.from_iterable(Table("data", file).rows([column or "text"]))
        yield from ([cell] for cell in cells if isinstance(cell, str) and cell.strip())
        return
    parts = _text(file)
    blank: list[str] = []
    for part in parts:
        if part.strip():
            yield chain(blank, [part], parts)
            return
        blank.append(part)


def _text(file: Path) -> Iterator[str]:
    if file.suffix.lower() == ".json":
        raise InputError("data", f"{file} is JSON; write JSON Lines (.jsonl), an object or a string per line")
    with name_file("data", file), file.open("rb") as data:
        start = data.read(4)
    for first_bytes, reason in NOT_TEXT.items():
        if start.startswith(first_bytes):
            raise InputError("data", f"{file} {reason}")
    with name_file("data", file), file.open(encoding="utf-8-sig", newline="") as text:
        while part := text.read(BLOCK_CHARACTERS):
            if "\0" in part:
                raise InputError("data", f"{file} is a binary file, expected UTF-8 text")
            yield part


def download(paths: Sequence[str], log: Callable[[str], object] = lambda line: None) -> list[str]:
    """Download data sets from the Hub, and return the Arrow files where the library ``datasets`` keeps them.

    Args:
        paths: ``hub:NAME``, ``hub:NAME:CONFIG`` or ``hub:NAME:CONFIG:SPLIT`` is a data set; by default, the split is
            "train". Other paths stay as they are.
        log: called with a line about each data set.

    Raises:
        InputError: if a data set can't be read.
    """
    files = []
    for path in paths:
        name, config, split, *rest = [*path.removeprefix(HUB).split(":"), "", ""]
        if not path.startswith(HUB):
            files.append(path)
            continue
        if not name or len(rest) > 2 or any(rest):
            raise InputError("data", f"expected hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT, got {path!r}")
        from datasets import load_dataset  # this import takes two seconds

        log(f"downloading {path}")
        try:
            data = load_dataset(name, config or None, split=split or "train")
        except Exception as error:  # the library, its readers and the network raise errors of all kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError("data", f"cannot read {path} from the Hugging Face Hub ({reason})") from None
        files += [file["filename"] for file in data.cache_files]
    return files
