"""Plain text to train on, read as a stream: the user's files, or the documentation that comes with Python."""

from __future__ import annotations

import ast
import glob
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import chain
from pathlib import Path

from ..errors import MAX_NAME, InputError, list_some, short_repr
from ..files import check_regular
from ..manifest import fingerprint, fingerprint_of_files
from .read import JSON, TABLES, Document, name_file, read_documents

PAGE_LENGTH = 4000
"""The number of characters in a page, about: text is split into pages before some are held out."""
HELD_OUT_EVERY = 10
"""One page in this number is held out."""
SUFFIXES = (".txt", ".text", ".md", ".rst", *JSON, ".parquet", ".arrow")
"""Folders are searched for files of these suffixes."""


@cache
def default_documents() -> list[str]:
    """Return about 2 MB of English that comes with Python: ``pydoc_data.topics`` and the standard library's docstrings.

    The sources are parsed, not imported. The docstrings of a module form one document. If this Python has neither, that
    is an InputError.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "pydoc_data", "__pycache__"}
    sources: list[Path] = []
    # Most files may be in folders that are skipped, so these are not searched.
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in skipped]
        sources += [Path(folder, name) for name in files if name.endswith(".py")]
    documents = ["\n\n".join(_docstrings(path)) for path in sorted(sources)]
    with suppress(ImportError):  # some distributions package it separately
        from pydoc_data import topics

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


class TextSource:
    """The text of files, read again in every pass. No more of it is in memory than a part of a document.

    Args:
        paths: files, folders and patterns such as "data/**/*.txt". Folders are searched for files with known suffixes.
            No paths mean :func:`default_documents`.
        column: the text column of tables; by default "text".
        characters: how many characters to read, from the beginning; by default all.

    Raises:
        InputError: if a file does not exist, a folder or a pattern has no files, or a column is named without a table.
            A file's content is checked when it is read.
    """

    files: list[Path]
    """The files, in reading order."""

    def __init__(
        self, paths: Sequence[str | Path] = (), column: str | None = None, characters: int | None = None
    ) -> None:
        self.paths = tuple(str(path) for path in paths)
        self.column = column
        self.source = describe_source(self.paths)
        self.characters = characters
        self.files = [file for path in self.paths for file in _find_files(path)]
        if column is not None and not any(file.suffix.lower() in TABLES for file in self.files):
            raise InputError("column", f"only for {', '.join(TABLES)} files; there is none in {self.source}")

    @property
    def about_files(self) -> str:
        """A line for people that says which files are read."""
        return f"the text is {list_some(self.files, MAX_NAME) if self.files else self.source}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text as it was when this property was first read."""
        return self.compute_hash()

    def compute_hash(self) -> str:
        """Return a hash of the text as it is now: of its files' bytes, and of the column that is read."""
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
            yield from ([document] for document in default_documents())
            return
        none = True
        for file in self.files:
            empty = True
            for document in read_documents(file, self.column):
                none = empty = False
                yield document
            if empty and str(file) in self.paths:
                raise InputError("data", f"{file} is empty")
        if none:
            raise InputError("data", f"no text in {list_some(self.paths, MAX_NAME)}")

    def pages(self) -> Iterator[str]:
        """Yield the pages of all documents, as :func:`split_pages` cuts them."""
        return chain.from_iterable(map(split_pages, self.documents()))

    def __iter__(self) -> Iterator[str]:
        """Yield the pages to train on, which are not held out."""
        return (page for number, page in enumerate(self.pages()) if not is_held_out(number))


def _find_files(pattern: str) -> list[Path]:
    """Return the files of a path or a pattern, in an order that does not depend on the file system."""
    path = Path(pattern)
    with name_file("data", path):
        if pattern and path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES)
            none = f"{path} holds no {', '.join(SUFFIXES)} file"
        elif pattern and path.exists():
            check_regular("data", path)
            return [path]
        elif glob.has_magic(pattern):
            files = [match for match in map(Path, sorted(glob.glob(pattern, recursive=True))) if match.is_file()]
            none = f"no file matches {short_repr(pattern, MAX_NAME)}"
        else:
            none, files = f"no such file or folder: {short_repr(pattern, MAX_NAME)}", []
    if not files:
        raise InputError("data", none)
    return files


def describe_source(paths: Sequence[str]) -> str:
    """Describe where a text comes from, for people to read."""
    return ", ".join(paths) or "the documentation inside this Python"


def is_held_out(index: int) -> bool:
    """Return whether a page is held out. Only its number decides, so the split is the same in every run."""
    return index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2


def split_pages(document: Document) -> Iterator[str]:
    """Yield pages of about PAGE_LENGTH characters, each cut at the last blank line, line end or space that fits.

    The pages are the same however the document is divided into parts.
    """
    text = ""
    for part in document:
        text += part
        start = 0
        while len(text) - start > PAGE_LENGTH:
            cuts = (text.rfind(mark, start + PAGE_LENGTH // 2, start + PAGE_LENGTH) for mark in ("\n\n", "\n", " "))
            end = next((cut for cut in cuts if cut != -1), start + PAGE_LENGTH)
            yield text[start:end]
            start = end
        text = text[start:]
    yield text
