"""Tokenize labeled rows, and put them into batches, padded or packed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import InputError, shown
from ..lab.progress import Progress
from .glue import Split
from .masks import IGNORED
from .streams import in_lots
from .windows import end_padding
from .words import on_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models import EncoderConfig

LOT = 1024
"""Number of rows that are tokenized at a time."""


@dataclass(frozen=True)
class Rows(Dataset[dict[str, Any]]):
    """The tokenized rows of a split.

    Args:
        rows: the rows, each of two parts or three: its token ids, their types, and with ``per_word`` their labels.
        typed: whether the tokenizer gives types and the model has them.
        labels: the label of each row; none with ``per_word``.
        cut: number of rows that were truncated.
        pad: the id of padding.
        end: padding tokens after even the longest row of a batch; a funnel that truncates drops them.
        per_word: whether tokens have labels: the class of a word is that of its first token, others are ``IGNORED``.
    """

    rows: list[list[array[int]]]
    typed: bool
    labels: list[float]
    cut: int
    pad: int
    end: int = 0
    per_word: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids, types, *labels = (part.tolist() for part in self.rows[row])
        found = {"ids": ids, "label": labels[0] if self.per_word else self.labels[row]}
        return {**found, "types": types} if self.typed else found

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [len(ids) for ids, *_ in self.rows]

    def padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate rows into a padded batch, (rows, tokens of the longest row plus ``end``)."""
        width = max(len(row["ids"]) for row in rows) + self.end
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([row["ids"] + [self.pad] * (width - len(row["ids"])) for row in rows])}
        if self.typed:
            batch["token_type_ids"] = torch.tensor([row["types"] + [0] * (width - len(row["types"])) for row in rows])
        if int(lengths.min()) < width:
            batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
        if self.per_word:
            labels = [row["label"] + [IGNORED] * (width - len(row["ids"])) for row in rows]
            return {**batch, "labels": torch.tensor(labels)}
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    def packed(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate rows into a packed batch: one row, (1, all tokens), with position and document ids."""
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([[token for row in rows for token in row["ids"]]])}
        if self.typed:
            batch["token_type_ids"] = torch.tensor([[kind for row in rows for kind in row["types"]]])
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return {
            **batch,
            "position_ids": (torch.arange(int(lengths.sum())) - starts).unsqueeze(0),
            "document_ids": torch.arange(len(rows)).repeat_interleave(lengths).unsqueeze(0),
            "labels": torch.tensor(
                [[label for row in rows for label in row["label"]]] if self.per_word else [row["label"] for row in rows]
            ),
        }

    def classes_of_words(self) -> list[list[int]]:
        """Return the classes of each row's words, of those that have a token."""
        return [[label for label in self[row]["label"] if label != IGNORED] for row in range(len(self))]


def tokenized(
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    config: EncoderConfig,
    *,
    regression: bool,
    per_word: bool = False,
    progress: Progress | None = None,
) -> Rows:
    """Tokenize the rows of a split, with all processors.

    Rows have the special tokens that the tokenizer puts around text.

    Args:
        split: the labeled rows.
        tokenizer: the model's tokenizer.
        max_length: truncate longer rows to this number of tokens, the longer text of a pair first; None truncates none.
        config: the model's configuration: how many token types it has, and whether its poolings drop the end of a row.
        regression: whether labels are numbers to predict.
        per_word: whether rows are words with a class each.
        progress: is told the number of rows as they are tokenized.

    Raises:
        InputError: if no word of a row has a token.
    """
    # The tokenizer's own limit does not matter: the model checks whether rows fit.
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False, "return_offsets_mapping": per_word}
    rows: list[list[array[int]]] = []
    cut = kinds = 0
    for lot in in_lots(zip(split.texts, split.labels, strict=True), LOT):
        words, classes = zip(*lot, strict=True)
        texts = [[" ".join(row) for row in words]] if per_word else [[*side] for side in zip(*words, strict=True)]
        found = tokenizer(*texts, **options)
        longer = [max_length is not None and len(row) > max_length for row in found["input_ids"]]
        if any(longer):
            found = tokenizer(*texts, truncation=True, max_length=max_length, **options)
        ids = found["input_ids"]
        types = found.get("token_type_ids") or [[]] * len(ids)
        cut, kinds = cut + sum(longer), max(kinds, *(1 + max(row, default=-1) for row in types))
        parts = [ids, types]
        if per_word:
            parts.append([on_tokens(*row) for row in zip(words, classes, found["offset_mapping"], strict=True)])
            if empty := [row for row, each in zip(words, parts[-1], strict=True) if set(each) == {IGNORED}]:
                raise InputError("text", f"no word of {shown(empty[0])} has a token")
        rows += [[array("i", part) for part in row] for row in zip(*parts, strict=True)]
        if progress is not None:
            progress.step(len(ids))
    labels = [float(label) for label in split.labels] if regression else split.labels
    # Without types in the model, as with RoBERTa, or from the tokenizer, there are none.
    typed = 0 < kinds <= config.type_vocab_size
    end = end_padding(config)
    return Rows(rows, typed, [] if per_word else labels, cut, tokenizer.pad_token_id, end, per_word)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, per_word: bool = False) -> None:
    """Check that a tokenizer fits a model with ``vocab_size`` tokens, and rows of words with ``per_word``.

    Raises:
        InputError: if its ids are too large, it lacks a padding token or a special token before text, or it does not
            say where in a text its tokens are, for rows of words.
    """
    if per_word and not tokenizer.is_fast:
        raise InputError("tokenizer", "expected one with a tokenizer.json, which says where in a text tokens are")
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        told = f"it has ids up to {largest}, but the model has {vocab_size} tokens; it belongs to another model"
        raise InputError("tokenizer", told)
    if tokenizer.pad_token_id is None:
        raise InputError("tokenizer", "it has no padding token ([PAD] in BERT)")
    if tokenizer("text")["input_ids"][0] not in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        raise InputError("tokenizer", "it puts no special token before text ([CLS] in BERT), which the model reads")
