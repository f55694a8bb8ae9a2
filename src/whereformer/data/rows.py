"""Tokenize labelled rows and put them into batches, padded or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import InputError
from .glue import Split
from .windows import end_padding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models import EncoderConfig


@dataclass(frozen=True)
class Rows(Dataset[dict[str, Any]]):
    """The tokenized rows of a split.

    Args:
        ids: the token ids of each row.
        types: the token types of each row; None unless the tokenizer gives them and the model has them.
        labels: the label of each row.
        cut: number of rows that were truncated.
        pad: the id of padding.
        end: padding tokens after even the longest row of a batch; a funnel that truncates drops them.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    labels: list[float]
    cut: int
    pad: int
    end: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = {"ids": self.ids[row], "label": self.labels[row]}
        return found if self.types is None else {**found, "types": self.types[row]}

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [len(ids) for ids in self.ids]

    def padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate rows into a padded batch, (rows, tokens of the longest row plus ``end``)."""
        width = max(len(row["ids"]) for row in rows) + self.end
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([row["ids"] + [self.pad] * (width - len(row["ids"])) for row in rows])}
        if self.types is not None:
            batch["token_type_ids"] = torch.tensor([row["types"] + [0] * (width - len(row["types"])) for row in rows])
        if int(lengths.min()) < width:
            batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    def packed(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate rows into a packed batch: one row, (1, all tokens), with position and document ids."""
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([[token for row in rows for token in row["ids"]]])}
        if self.types is not None:
            batch["token_type_ids"] = torch.tensor([[kind for row in rows for kind in row["types"]]])
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return {
            **batch,
            "position_ids": (torch.arange(int(lengths.sum())) - starts).unsqueeze(0),
            "document_ids": torch.arange(len(rows)).repeat_interleave(lengths).unsqueeze(0),
            "labels": torch.tensor([row["label"] for row in rows]),
        }


def encode(
    split: Split, tokenizer: PreTrainedTokenizerBase, max_length: int | None, config: EncoderConfig, *, regression: bool
) -> Rows:
    """Tokenize a split, with the special tokens that the tokenizer puts around text.

    Args:
        split: the rows.
        tokenizer: the model's tokenizer.
        max_length: truncate longer rows to this number of tokens, the longer text of a pair first; None truncates none.
        config: the model's configuration: how many token types it has, and whether its poolings drop the end of a row.
        regression: whether labels are numbers to predict.
    """
    texts = [[row[place] for row in split.texts] for place in range(len(split.texts[0]))]
    # The tokenizer's own limit does not matter: the model checks whether rows fit.
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    found = tokenizer(*texts, **options)
    ids, types, cut = found["input_ids"], found.get("token_type_ids"), 0
    if max_length is not None:
        cut = sum(len(row) > max_length for row in ids)
        if cut:
            found = tokenizer(*texts, truncation=True, max_length=max_length, **options)
            ids, types = found["input_ids"], found.get("token_type_ids")
    if types is not None and max(map(max, types)) >= config.type_vocab_size:
        types = None  # the model has no segments, as with RoBERTa
    labels = [float(label) for label in split.labels] if regression else list(split.labels)
    return Rows(ids, types, labels, cut, tokenizer.pad_token_id, end_padding(config))


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that a tokenizer fits a model with ``vocab_size`` tokens.

    Raises:
        InputError: if its ids are too large, or it lacks a padding token or a special token before text.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise InputError(
            "tokenizer",
            f"it has ids up to {largest}, but the model has {vocab_size} tokens; it belongs to another model",
        )
    if tokenizer.pad_token_id is None:
        raise InputError("tokenizer", "it has no padding token ([PAD] in BERT)")
    if tokenizer("text")["input_ids"][0] not in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        raise InputError("tokenizer", "it puts no special token before text ([CLS] in BERT), which the model reads")
