"""Plain text to train on, read as a stream: the user's files, or the documentation that comes with Python."""

from __future__ import annotations

import ast
import glob
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

from ..errors import MAX_NAME, InputError, list_some, short_repr
from ..files import check_regular
from ..manifest import fingerprint, fingerprint_of_files
from .read import JSON, TABLES, Document, documents_in, reading

PIECE = 4000
"""Text is split into pieces of about this number of characters (a page or two) before some are held out."""
HELD_OUT = 10
"""One piece in this number is held out."""
SEARCHED = (".txt", ".text", ".md", ".rst", *JSON, ".parquet", ".arrow")
"""Folders are searched for files of these suffixes."""


def default_documents() -> list[str]:
    """Return about 2 MB of English that comes with Python: ``pydoc_data.topics`` and the standard library's docstrings.

    The sources are parsed, not imported. The docstrings of a module form one document.

    Raises:
        InputError: if this Python has neither.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "pydoc_data", "__pycache__"}
    sources: list[Path] = []
    # Most files may be in folders that are skipped, so these are not searched.
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in skipped]
        sources += [Path(folder, name) for name in files if name.endswith(".py")]
    documents = ["\n\n".join(_docstrings(path)) for path in sorted(sources)]
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
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


class Text:
    """The text of files, read anew in every pass. No more of it is in memory than a part of a document.

    Args:
        paths: files, folders and patterns such as "data/**/*.txt". Folders are searched for files with known suffixes.
            No paths mean :func:`default_documents`.
        column: the text column of tables; by default "text".
        characters: how many characters to read, from the beginning; by default all.

    Raises:
        InputError: if there is no such file, a folder or a pattern has none, or there is a column but no table. A
            file's content is checked when it is read.
    """

    files: list[Path]
    """The files, in the order in which they are read."""

    def __init__(
        self,
        paths: Sequence[str | Path] = (),
        column: str | None = None,
        characters: int | None = None,
    ) -> None:
        self.paths = tuple(str(path) for path in paths)
        self.column = column
        self.source = source_of(self.paths)
        self.characters = characters
        self.files = [file for path in self.paths for file in _files(path)]
        if column is not None and not any(file.suffix.lower() in TABLES for file in self.files):
            raise InputError("column", f"only for {', '.join(TABLES)} files; there is none in {self.source}")

    @property
    def about_files(self) -> str:
        """Which files are read, in a line for people to read."""
        return f"the text is {list_some(self.files, MAX_NAME) if self.files else self.source}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text as it was when it was looked at first."""
        return self.hashed()

    def hashed(self) -> str:
        """Return a hash of the text as it is now: of the bytes of its files, and of the column that is read."""
        if self.characters is not None or not self.paths:
            return fingerprint("".join(document) for document in self.documents())
        return fingerprint_of_files(self.files, [self.column or ""])

    def documents(self) -> Iterator[Document]:
        """Yield every document that holds text.

        Raises:
            InputError: if a file is empty, not UTF-8 or has no text; the message names the file.
        """
        left = sys.maxsize if self.characters is None else self.characters

        def cut(document: Document) -> Iterator[str]:
            nonlocal left
            for part in document:
                yield part[:left]
                left -= min(left, len(part))
                if not left:
                    return

        for document in self._all():
            yield cut(document)
            if not left:
                return

    def _all(self) -> Iterator[Document]:
        if not self.paths:
            yield from ([document] for document in self._default)
            return
        none = True
        for file in self.files:
            empty = True
            for document in documents_in(file, self.column):
                none = empty = False
                yield document
            if empty and str(file) in self.paths:
                raise InputError("data", f"{file} is empty")
        if none:
            raise InputError("data", f"no text in {list_some(self.paths, MAX_NAME)}")

    def pages(self) -> Iterator[str]:
        """Yield the pages of all documents, as :func:`pages_of` cuts them."""
        return chain.from_iterable(map(pages_of, self.documents()))

    def __iter__(self) -> Iterator[str]:
        """Yield the pages to train on, which are not held out."""
        return (page for number, page in enumerate(self.pages()) if not is_held_out(number))

    @cached_property
    def _default(self) -> list[str]:
        return default_documents()


def _files(given: str) -> list[Path]:
    """Return the files that a path or a pattern means, in an order that does not depend on the file system."""
    path = Path(given)
    with reading("data", path):
        if given and path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in SEARCHED)
            none = f"{path} holds no {', '.join(SEARCHED)} file"
        elif given and path.exists():
            check_regular("data", path)
            return [path]
        elif glob.has_magic(given):
            found = [match for match in map(Path, sorted(glob.glob(given, recursive=True))) if match.is_file()]
            none = f"no file matches {short_repr(given, MAX_NAME)}"
        else:
            none, found = f"no such file or folder: {short_repr(given, MAX_NAME)}", []
    if not found:
        raise InputError("data", none)
    return found


def source_of(paths: Sequence[str]) -> str:
    """Describe where a text comes from, for people to read."""
    return ", ".join(paths) or "the documentation inside this Python"


def is_held_out(index: int) -> bool:
    """Return whether a page is held out. Only its place decides, so the split is the same in every run."""
    return index % HELD_OUT == HELD_OUT // 2


def pages_of(document: Document) -> Iterator[str]:
    """Yield pages of about PIECE characters, each cut at the last blank line, line end or space that fits.

    The pages are the same however the document is divided into parts.
    """
    text = ""
    for part in document:
        text += part
        start = 0
        while len(text) - start > PIECE:
            cuts = (text.rfind(mark, start + PIECE // 2, start + PIECE) for mark in ("\n\n", "\n", " "))
            end = next((cut for cut in cuts if cut != -1), start + PIECE)
            yield text[start:end]
            start = end
        text = text[start:]
    yield text
