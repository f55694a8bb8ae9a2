"""Tables with a class for each word: words and as many classes, or texts and the spans in them that have a class."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, shown, some_of
from ..lab.fingerprint import fingerprint_of_files
from .glue import Data, RowFacts, Split, Task, check_columns, sampled, sorted_classes
from .masks import IGNORED
from .read import TableFile, open_table

OUTSIDE = "O"
"""The class of words that are in no span."""
SPAN_TAG = re.compile(r"O|[BIES]-.+")
"""A class that says where a word is in a span: outside, or its beginning, inside, end or single word."""


def labeled_words(text: Any, label: Any) -> tuple[tuple[str, ...], list[str]]:
    """Return the words of a row and the names of their classes.

    Args:
        text: a list of words, or a text, which spaces separate into words.
        label: a list of classes or a text of them, one for each word; or for a text the spans that have a class, each
            a mapping of its first character ("start"), the one after its last ("end") and its class ("label").

    Raises:
        ValueError: for anything else; it says what was expected.
    """
    if isinstance(text, str) and isinstance(label, list) and all(isinstance(each, Mapping) for each in label):
        words, classes = _between_spans(text, label)
    else:
        words = text.split() if isinstance(text, str) else text
        classes = label.split() if isinstance(label, str) else label
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise ValueError(f"expected a text or a list of words, got {shown(text)}")
        if not (isinstance(classes, list) and all(type(name) in (str, int) for name in classes)):
            raise ValueError(f"expected a list of classes, or of spans in a text, got {shown(label)}")
        if len(words) != len(classes):
            raise ValueError(f"expected a class for each of {len(words)} words, got {len(classes)}")
    if not words:
        raise ValueError("expected at least one word, got none")
    return tuple(words), [sys.intern(str(name).strip()) for name in classes]


def _between_spans(text: str, spans: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Cut a text at spaces and at the ends of spans; the first word of a span is its beginning, others are inside."""
    words: list[str] = []
    classes: list[str] = []
    end = 0
    for first, last, name in [*sorted(_span(each, len(text)) for each in spans), (len(text), len(text), "")]:
        if first < end:
            raise ValueError(f"expected spans that don't overlap, got one that begins at {first} before {end}")
        before, inside = text[end:first].split(), text[first:last].split()
        words += before + inside
        tags = [f"B-{name}", *[f"I-{name}"] * len(inside)]
        classes += [OUTSIDE] * len(before) + tags[: len(inside)]
        end = last
    return words, classes


def _span(span: Mapping[str, Any], length: int) -> tuple[int, int, str]:
    first, last, name = (span.get(key) for key in ("start", "end", "label"))
    if isinstance(first, int) and isinstance(last, int) and isinstance(name, str) and 0 <= first < last <= length:
        return first, last, name.strip()
    told = f"a span as {{start, end, label}} within the {length} characters of the text"
    raise ValueError(f"expected {told}, got {shown(dict(span))}")


def _labeled(table: TableFile, columns: tuple[str, str]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Return the words of each row of a table and the names of their classes.

    Raises:
        InputError: if there are none, or a row has something else, or not as many classes as words.
    """
    check_columns(table, columns)
    found = []
    for number, (text, label) in enumerate(table.rows(columns)):
        try:
            found.append(labeled_words(text, label))
        except ValueError as error:
            raise InputError(table.field, f"{table.file}, row {number}: {error}") from None
    if not found:
        raise InputError(table.field, f"{table.file}: expected at least one row, got none")
    return found


@dataclass(frozen=True)
class WordTask:
    """A task of the user's own that has a class for each word.

    Args:
        train, validation: the table files.
        text: the column of words or texts.
        label: the column of their classes or spans.
    """

    train: Path
    validation: Path
    text: str
    label: str

    def load(self, train_rows: int | None = None) -> Data:
        """Load the rows. With ``train_rows``, train on a random sample of this number of rows.

        Raises:
            InputError: if a table can't be read, a column is missing, or labels are invalid.
        """
        columns = (self.text, self.label)
        files = {"train": self.train, "validation": self.validation}
        rows = {name: _labeled(open_table(name, file, columns), columns) for name, file in files.items()}
        names = sorted_classes({each for _, classes in rows["train"] for each in classes}, self.train)
        places = {name: place for place, name in enumerate(names)}
        chosen = sampled(len(rows["train"]), train_rows)
        subsets = [] if chosen is None else ["train"]
        splits = {}
        for name, found in rows.items():
            kept = [found[row] for row in sorted(chosen)] if name == "train" and chosen is not None else found
            for _, classes in kept:
                if unknown := [each for each in classes if each not in places]:
                    told = f"expected one of the training rows' classes, {some_of(names)}, got {shown(unknown[0])}"
                    raise InputError(name, f"{files[name]}: {told}")
            labels = [[places[each] for each in classes] for _, classes in kept]
            splits[name] = Split([words for words, _ in kept], labels)
        spans = all(SPAN_TAG.fullmatch(name) for name in names)
        metrics = ("span_f1", "span_precision", "span_recall") if spans else ("accuracy", "macro_f1")
        task = Task(self.train.stem, (self.text,), names, metrics, self.label, per_word=True)
        counts = {name: len(split.labels) for name, split in splits.items()}
        read = fingerprint_of_files([*files.values()], [*columns, str(counts)])
        facts = RowFacts(f"{self.train}, {self.validation}", counts, subsets, read)
        return Data(task, splits["train"], {"": splits["validation"]}, facts)


def on_tokens(words: Sequence[str], classes: Sequence[int], places: Sequence[tuple[int, int]]) -> list[int]:
    """Return the class of each token: that of the word that it begins, else ``IGNORED``.

    A word without a token, such as a character that the tokenizer leaves out, has no class among the result.

    Args:
        words: the words; the tokens are those of all of them with a space between two.
        classes: the class of each word.
        places: where each token begins and ends in that text; (0, 0) for special tokens.
    """
    ends, end = [], -1
    for each in words:
        end += 1 + len(each)
        ends.append(end)
    word, found = 0, []
    for start, stop in places:
        while word < len(words) and ends[word] <= start:
            word += 1
        begins = word < len(words) and ends[word] - len(words[word]) < stop
        found.append(classes[word] if begins else IGNORED)
        word += begins
    return found
