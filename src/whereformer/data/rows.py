"""Tokenize labeled rows, and put them into batches, padded or packed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import InputError
from ..lab.progress import Progress
from .glue import Split
from .streams import in_lots
from .windows import end_padding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models import EncoderConfig

LOT = 1024
"""Number of rows that are tokenized at a time."""


@dataclass(frozen=True)
class Rows(Dataset[dict[str, Any]]):
    """The tokenized rows of a split.

    Args:
        rows: the token ids and their types of each row.
        typed: whether the tokenizer gives types and the model has them.
        labels: the label of each row.
        cut: number of rows that were truncated.
        pad: the id of padding.
        end: padding tokens after even the longest row of a batch; a funnel that truncates drops them.
    """

    rows: list[tuple[array[int], array[int]]]
    typed: bool
    labels: list[float]
    cut: int
    pad: int
    end: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids, types = (part.tolist() for part in self.rows[row])
        return {"ids": ids, "label": self.labels[row], **({"types": types} if self.typed else {})}

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [len(ids) for ids, _ in self.rows]

    def padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate rows into a padded batch, (rows, tokens of the longest row plus ``end``)."""
        width = max(len(row["ids"]) for row in rows) + self.end
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([row["ids"] + [self.pad] * (width - len(row["ids"])) for row in rows])}
        if self.typed:
            batch["token_type_ids"] = torch.tensor([row["types"] + [0] * (width - len(row["types"])) for row in rows])
        if int(lengths.min()) < width:
            batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
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
            "labels": torch.tensor([row["label"] for row in rows]),
        }


def tokenized(
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    config: EncoderConfig,
    *,
    regression: bool,
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
        progress: is told the number of rows as they are tokenized.
    """
    # The tokenizer's own limit does not matter: the model checks whether rows fit.
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    rows: list[tuple[array[int], array[int]]] = []
    cut = kinds = 0
    for lot in in_lots(split.texts, LOT):
        texts = [[*side] for side in zip(*lot, strict=True)]
        found = tokenizer(*texts, **options)
        longer = [max_length is not None and len(row) > max_length for row in found["input_ids"]]
        if any(longer):
            found = tokenizer(*texts, truncation=True, max_length=max_length, **options)
        ids = found["input_ids"]
        types = found.get("token_type_ids") or [[]] * len(ids)
        cut, kinds = cut + sum(longer), max(kinds, *(1 + max(row, default=-1) for row in types))
        rows += [(array("i", one), array("i", other)) for one, other in zip(ids, types, strict=True)]
        if progress is not None:
            progress.step(len(ids))
    labels = [float(label) for label in split.labels] if regression else split.labels
    # Without types in the model, as with RoBERTa, or from the tokenizer, there are none.
    typed = 0 < kinds <= config.type_vocab_size
    return Rows(rows, typed, labels, cut, tokenizer.pad_token_id, end_padding(config))


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that a tokenizer fits a model with ``vocab_size`` tokens.

    Raises:
        InputError: if its ids are too large, or it lacks a padding token or a special token before text.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        told = f"it has ids up to {largest}, but the model has {vocab_size} tokens; it belongs to another model"
        raise InputError("tokenizer", told)
    if tokenizer.pad_token_id is None:
        raise InputError("tokenizer", "it has no padding token ([PAD] in BERT)")
    if tokenizer("text")["input_ids"][0] not in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        raise InputError("tokenizer", "it puts no special token before text ([CLS] in BERT), which the model reads")
