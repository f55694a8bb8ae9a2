"""Examples in reports: what models got right, as rows of text that the record of a run keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..data.windows import IGNORED
from ..errors import join_words
from .sheet import Column, Sheet

MAX_ROWS = 12
BLANK, CONTEXT = "____", 15
"""The sign for a word to fill in, and the number of tokens that are read on each side of it."""
ANSWERS = ("text", "word", "right", "wrong")
"""The columns of :func:`compare_answers`."""
MAX_LETTERS = 40
"""Letters of the longest text that stays in one line."""


def build_sheet(
    title: str, rows: list[list[str]], note: str = "", columns: Sequence[Column | str] = ANSWERS
) -> list[Sheet]:
    """Return the table of examples, which is on pages only; none without rows, as from records of earlier versions."""
    full = [row for row in rows if len(row) == len(columns)]
    letters = [max(map(len, texts)) for texts in zip(*full, strict=True)]
    heads = [
        Column(column, left=True, wraps=count > MAX_LETTERS) if isinstance(column, str) else column
        for column, count in zip(columns, letters, strict=False)  # a table without rows has no counts
    ]
    return [Sheet.of(title, heads, full, notes=(note,) * bool(note), name_column=-1, page_only=True)] if full else []


def compare_answers(text: str, right: str, answers: Mapping[str, str]) -> list[str]:
    """Return a row: the text, its right answer, the models that give it, and the others with their answers."""
    names_of: dict[str, list[str]] = {right: []}
    for name, answer in answers.items():
        names_of.setdefault(answer, []).append(name)
    mistakes = [f"{join_words(names)}: {answer}" for answer, names in names_of.items() if answer != right]
    return [text, right, join_words(names_of[right]), "; ".join(mistakes)]


def find_words(tokenizer: Any, inputs: Tensor, labels: Tensor, limit: int) -> list[int]:
    """Return which of the first ``limit`` labels are whole words, as indices among the labels.

    ``inputs`` and ``labels`` are (tokens,); labels have IGNORED where there are none.
    """
    tokens, words = inputs.where(labels == IGNORED, labels), list[int]()
    for index, token in enumerate((labels != IGNORED).nonzero().flatten()[:limit].tolist()):
        word = decode(tokenizer, tokens[token : token + 1]).strip()
        around = decode(tokenizer, tokens[max(0, token - 1) : token + 2])
        if len(word) > 1 and word.isalpha() and word in re.findall(r"\w+", around):
            words.append(index)
    return words


def fill_blank(
    tokenizer: Any, inputs: Tensor, labels: Tensor, index: int, answers: Sequence[int], *, causal: bool = False
) -> tuple[str, list[str]]:
    """Return the text around a label, with a blank in its place, and the words of the label and of answers.

    Args:
        tokenizer: decodes ids.
        inputs, labels: (tokens,). Other labels' tokens are filled in.
        index: which of the labels.
        answers: ids.
        causal: whether the model sees only the text before the blank.
    """
    tokens = inputs.where(labels == IGNORED, labels)
    blank = int((labels != IGNORED).nonzero().flatten()[index])
    sides = tokens[max(0, blank - CONTEXT) : blank], tokens[blank + 1 :][: 0 if causal else CONTEXT]
    left, right = (decode(tokenizer, side).split() for side in sides)
    # The first and the last word may be parts of words. Text without spaces stays.
    before, after = " ".join(left[1:] or left), " ".join(right[:-1] or right)
    words = [tokenizer.decode([token]).strip() for token in (int(tokens[blank]), *answers)]
    words = [re.sub("^##(?=.)", "-", word) for word in words]  # WordPiece's sign for a part of a word
    return f"{before} {BLANK} {after}".strip(), words


def decode(tokenizer: Any, ids: Tensor) -> str:
    """Return the text of ids, (tokens,), without special tokens."""
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
