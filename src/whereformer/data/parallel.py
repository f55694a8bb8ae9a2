"""Parallel text: pairs of lines in two languages, read as a stream from files or tables, and encoded once.

The cache has a folder for each text and size of vocabulary, with the tokenizer of both languages,
and the rows of both parts of the text. A pair is a row of two parts, the source and the target. It has no tokens if one
of its lines is empty, so the rows also show how many pairs the text has, and how many of them are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import MAX_NAME, InputError, join_words, list_some, short_repr
from ..files import check_regular
from ..manifest import fingerprint_of_files
from . import subwords
from .encode import Facts, get_or_build
from .read import TABLES, Table, read_lines
from .streams import RowFile, iter_chunks, open_rows, write_rows
from .tokenizers import read_tokenizer
from .windows import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT_EVERY, MAX_HELD_OUT = 20, 2000
"""Without a validation text, one pair in the first number is held out, but at most the second number of pairs."""

Pair = tuple[str, str]
"""A line and its translation."""


@dataclass(frozen=True)
class Pairs:
    """Pairs in files. Each iteration reads them again, with only some rows in memory.

    Raises:
        InputError: if a file does not exist, is not a table, or can be read only once, like a pipe; in an iteration,
            if a file cannot be read, or no file has text.
    """

    field: str  # the option that names the files
    files: tuple[Path, ...]  # tables with both languages, or two files of lines: the sources, and their translations
    columns: str | None = None  # columns of the tables, such as en,de. By default both, if there are only two
    # Whether to yield the pairs that are held out for evaluation, or the others; None yields all. Only the numbers of
    # the pairs decide, and no pair with an empty line is held out.
    held_out: bool | None = None

    def __post_init__(self) -> None:
        names = self._column_names
        if self.columns is not None and not (len(names) == len(set(names)) == 2 and all(names)):
            raise InputError("columns", f"expected two columns, such as en,de, got {self.columns!r}")
        if self._has_tables:
            for file in self.files:
                Table(self.field, file)
        elif len(self.files) != 2:
            files = list_some(self.files, MAX_NAME)
            raise InputError(self.field, f"expected {', '.join(TABLES)} files, or two files of lines, got {files}")
        else:
            check_regular(self.field, *self.files)

    @property
    def _has_tables(self) -> bool:
        return any(file.suffix.lower() in TABLES for file in self.files)

    @property
    def _column_names(self) -> list[str]:
        """The names of the columns, source first, if they are given."""
        return [] if self.columns is None else [name.strip() for name in self.columns.split(",")]

    @property
    def name(self) -> str:
        """The files that the pairs come from, for people to read."""
        return ", ".join(map(str, self.files))

    def __iter__(self) -> Iterator[Pair]:
        full, has_language = 0, [False, False]  # the number of pairs with text; whether each language has text
        for pair in chain.from_iterable(map(self._read_table, self.files)) if self._has_tables else self._read_lines():
            has_language = [has or bool(line.strip()) for has, line in zip(has_language, pair, strict=True)]
            full += has_text(*pair)
            chosen = has_text(*pair) and full % HELD_OUT_EVERY == 1 and full <= HELD_OUT_EVERY * MAX_HELD_OUT
            if self.held_out in (None, chosen):
                yield pair
        if not all(has_language):
            raise InputError(self.field, f"no text in {self.name}")

    def _read_table(self, file: Path) -> Iterator[Pair]:
        """Yield two columns of a table, row by row. Empty cells become empty lines."""
        # Between tabs, quotation marks belong to the text.
        table = Table(self.field, file, quotes=file.suffix.lower() != ".tsv")
        names = self._column_names or table.names
        if len(names) not in (0, 2):
            raise InputError("columns", f"{file} has columns {list_some(names)}; name two of them, such as en,de")
        for number, cells in enumerate(table.rows(names), 1):
            if not all(cell is None or isinstance(cell, str) for cell in cells):
                problem = f"expected text in {join_words(names)}, got {short_repr(cells)}"
                raise InputError("columns", f"{file}, row {number}: {problem}")
            yield cells[0] or "", cells[1] or ""

    def _read_lines(self) -> Iterator[Pair]:
        """Yield the lines of two files in pairs."""
        lines = [read_lines(self.field, file) for file in self.files]
        for number, pair in enumerate(zip_longest(lines[0], lines[1])):
            if None in pair:
                end = f"{self.files[pair.index(None)]} ends after {number:,}"
                raise InputError(self.field, f"expected as many lines as translations, but {end}")
            yield pair


def has_text(source: str, target: str) -> bool:
    """Return whether both lines of a pair have text."""
    return bool(source.strip() and target.strip())


def fingerprint(parts: Mapping[str, Pairs]) -> str:
    """Return a hash of all pairs: of the bytes of their files, and of the part that each file belongs to."""
    files = [(part, file) for part, pairs in parts.items() for file in pairs.files if pairs.held_out is not True]
    names = [parts["training"].columns or "", *(part for part, _ in files)]
    return fingerprint_of_files([file for _, file in files], names)


def open_or_encode(
    cache: Path, parts: Mapping[str, Pairs], text: str, vocab_size: int, log: Callable[[str], object]
) -> tuple[dict[str, RowFile], PreTrainedTokenizerFast]:
    """Open the encoded pairs if the cache has them, else encode them there.

    The vocabulary is learned from the training pairs. Only one process may encode at a time.

    Args:
        cache, vocab_size, log: as for text in one language.
        parts: the pairs to train on ("training") and to evaluate on ("held_out").
        text: their :func:`fingerprint`.

    Returns:
        The rows of each part, of source and target with the ends of lines; and the tokenizer of both languages.

    Raises:
        InputError: if the text changes meanwhile, or another process is writing to the cache.
    """

    def fill(folder: Path) -> Facts:
        log("learning the vocabulary")
        lines = (line for pair in parts["training"] if has_text(*pair) for line in pair)
        tokenizer = subwords.fit(lines, vocab_size)
        tokenizer.save_pretrained(folder)
        log("encoding the text")
        for name, pairs in parts.items():
            write_rows(folder, name, _encode_pairs(tokenizer, pairs))
        if fingerprint(parts) != text:
            raise InputError("data", "the text changed while it was read; run the same command again")
        return {}

    folder, _ = get_or_build(cache, "pairs", [text, str(vocab_size)], fill, log)
    tokenizer: PreTrainedTokenizerFast = read_tokenizer(folder, "cache")
    return {name: open_rows(folder, name, 2) for name in parts}, tokenizer


def _encode_pairs(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[Pair]) -> Iterator[Sequence[list[int]]]:
    """Yield the ids of each pair's source and target."""
    for chunk in iter_chunks(pairs, subwords.CHUNK):
        lines = iter(subwords.encode(tokenizer, [line for pair in chunk if has_text(*pair) for line in pair]))
        yield from ((next(lines), next(lines)) if has_text(*pair) else ([], []) for pair in chunk)


def collate(pairs: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Make a batch: ``input_ids``, ``labels`` (-100 after a target's end) and, if any source is padded, their mask."""
    sources, targets = zip(*pairs, strict=True)
    lengths = torch.tensor([len(source) for source in sources])
    batch = {
        "input_ids": pad_sequence(list(sources), batch_first=True, padding_value=subwords.PAD),
        "labels": pad_sequence(list(targets), batch_first=True, padding_value=IGNORED),
    }
    width = batch["input_ids"].shape[1]
    if int(lengths.min()) < width:
        # Attention is faster without a mask.
        batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
    return batch
