"""Plain text to train on: the user's files, or the documentation that comes with Python."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import InputError, one_line

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
TABLE_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
PIECE = 4000
"""Text is split into pieces of about this number of characters (a page or two) before some are held out."""
HELD_OUT = 10
"""One piece in this number is held out."""


def default_documents() -> list[str]:
    """Return about 2 MB of English that comes with Python: ``pydoc_data.topics`` and the standard library's docstrings.

    The sources are parsed, not imported. The docstrings of a module form one document.

    Raises:
        InputError: if this Python has neither.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "pydoc_data", "__pycache__"}
    sources = [path for path in sorted(root.rglob("*.py")) if skipped.isdisjoint(path.relative_to(root).parts)]
    documents = ["\n\n".join(_docstrings(path)) for path in sources]
    try:
        from pydoc_data import topics
    except ImportError:
        pass  # some distributions package it separately
    else:
        documents += topics.topics.values()
    documents = [document for document in documents if document]
    if not documents:
        raise InputError("data", "this Python has no documentation to train on; give files or folders of text")
    return documents


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own sources
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # some sources are broken on purpose
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Like :func:`ast.walk`, but without expressions: they make up most of a tree and hold no docstrings."""
    queue: deque[ast.AST] = deque([tree])
    while queue:
        node = queue.popleft()
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                queue.extend(inner)
        yield node


def fingerprint(documents: Iterable[str]) -> str:
    """Return a short hash of the text, so that results from different texts can be told apart."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def documents_of(paths: Sequence[str | Path], column: str | None = None) -> list[str]:
    """Return the documents in ``paths``, or :func:`default_documents` if there are no paths."""
    return load_documents(paths, column) if paths else default_documents()


def source_of(paths: Sequence[str]) -> str:
    """Describe where these documents come from, for people to read."""
    return ", ".join(paths) or "the documentation inside this Python"


def load_documents(paths: Sequence[str | Path], column: str | None = None) -> list[str]:
    """Read documents from text, Parquet and JSON Lines files, and from folders of them.

    Args:
        paths: files or folders. Folders are searched for files with known suffixes. A text file is one document; a
            table has one document per row. A file with an unknown suffix is read as text.
        column: the text column of tables; by default "text", or the only column of strings.

    Raises:
        InputError: if a file is missing, empty, not UTF-8 or has no text; the message names the file.
    """
    documents = []
    for given in paths:
        path = Path(given)
        if not str(given) or not path.exists():
            raise InputError("data", f"no such file or folder: {str(given)!r}")
        files = [path]
        if path.is_dir():
            known = TEXT_SUFFIXES + TABLE_SUFFIXES
            files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in known)
            if not files:
                raise InputError("data", f"{path} holds no {', '.join(known)} file")
        for file in files:
            read = {".parquet": _parquet, ".jsonl": _json_lines, ".ndjson": _json_lines}.get(file.suffix.lower())
            try:
                found = [_text(file)] if read is None else read(file, column)
            except OSError as error:
                raise InputError("data", f"cannot read {file}: {error.strerror or error}") from None
            found = [document for document in found if document.strip()]
            if not found and not path.is_dir():
                raise InputError("data", f"{file} is empty")
            documents += found
    if not documents:
        raise InputError("data", f"no text in {', '.join(str(path) for path in paths)}")
    return documents


def _text(file: Path) -> str:
    data = file.read_bytes()
    if b"\0" in data:
        raise InputError("data", f"{file} is a binary file, expected UTF-8 text")
    return _decode(data, file)


def _decode(data: bytes, file: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("data", f"{file} is not UTF-8 text (byte {error.start}: {error.reason})") from None


def _json_lines(file: Path, column: str | None) -> list[str]:
    rows = []
    # Not splitlines(): it also splits at separators that JSON strings may contain unescaped.
    for number, line in enumerate(_decode(file.read_bytes(), file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Besides text that is no JSON: integers of thousands of digits, and lists within lists without end.
            raise InputError("data", f"{file}, line {number}: not JSON ({getattr(error, 'msg', error)})") from None
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise InputError("data", f"{file}, line {number}: expected an object or a string, got {line[:40]!r}")
        rows.append(row)
    strings = {name: None for row in rows for name, value in row.items() if isinstance(value, str)}
    if not rows:
        return []
    name = _pick(list(strings), column, str(file))
    # JSON allows half a surrogate pair; nothing else does.
    return [row[name].encode("utf-8", "replace").decode() for row in rows if isinstance(row.get(name), str)]


def _parquet(file: Path, column: str | None) -> list[str]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(file)
        strings = [
            field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        name = _pick(strings, column, str(file))
        return [value for value in parquet.read_table(file, columns=[name])[name].to_pylist() if value]
    except UnicodeDecodeError as error:
        # pyarrow does not check that text is UTF-8.
        raise InputError("data", f"{file} is not UTF-8 text: {error.object[:40]!r} ({error.reason})") from None
    except pa.ArrowException as error:
        raise InputError("data", f"{file} is not a Parquet file ({one_line(str(error))})") from None


def _pick(strings: Sequence[str], column: str | None, where: str) -> str:
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


def split_documents(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut every document at blank lines or line ends into pages, and hold one page in ten out.

    Which pages are held out depends only on their place, so the split is the same in every run.

    Returns:
        training and held-out pieces.

    Raises:
        InputError: if there are too few pages to hold one out.
    """
    pieces = [piece for document in documents for piece in pieces_of(document)]
    held_out = pieces[HELD_OUT // 2 :: HELD_OUT]
    training = [piece for index, piece in enumerate(pieces) if index % HELD_OUT != HELD_OUT // 2]
    if not held_out or not training:
        characters = sum(len(piece) for piece in pieces)
        raise InputError(
            "data",
            f"too little text to hold some out: {characters} characters, expected more than {PIECE * HELD_OUT // 2}",
        )
    return training, held_out


def pieces_of(document: str) -> Iterator[str]:
    """Yield pages of about PIECE characters, each cut at the last blank line, line end or space that fits."""
    start = 0
    while len(document) - start > PIECE:
        cuts = (document.rfind(mark, start + PIECE // 2, start + PIECE) for mark in ("\n\n", "\n", " "))
        end = next((cut for cut in cuts if cut != -1), start + PIECE)
        yield document[start:end]
        start = end
    yield document[start:]
