"""Labelled rows as batches: their tokens, padded or packed."""

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
    """A split's tokens.

    Args:
        ids: of each row.
        types: its token types, if the tokenizer gives them and the model has them.
        labels: of each row.
        cut: how many rows lost their end.
        pad: the id of padding.
        end: how much padding ends even the longest row of a batch, for a funnel to drop when it truncates.
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
        """Tokens of each row."""
        return [len(ids) for ids in self.ids]

    def padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch (rows, tokens of the longest one and ``end``)."""
        width = max(len(row["ids"]) for row in rows) + self.end
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        batch = {"input_ids": torch.tensor([row["ids"] + [self.pad] * (width - len(row["ids"])) for row in rows])}
        if self.types is not None:
            batch["token_type_ids"] = torch.tensor([row["types"] + [0] * (width - len(row["types"])) for row in rows])
        if int(lengths.min()) < width:
            batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    def packed(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The same batch as one row (1, all tokens)."""
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
    """A split's tokens, with the special tokens that the tokenizer puts around text.

    Args:
        split: the rows.
        tokenizer: of the model.
        max_length: longer rows are cut to it, the longer text of a pair first; None cuts none.
        config: of the model, which says what token types there are and whether poolings drop the end of a row.
        regression: whether labels are numbers.
    """
    texts = [[row[place] for row in split.texts] for place in range(len(split.texts[0]))]
    # Its own limit does not matter: whether rows fit the model is checked by the model.
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    found = tokenizer(*texts, **options)
    ids, types, cut = found["input_ids"], found.get("token_type_ids"), 0
    if max_length is not None:
        cut = sum(len(row) > max_length for row in ids)
        if cut:
            found = tokenizer(*texts, truncation=True, max_length=max_length, **options)
            ids, types = found["input_ids"], found.get("token_type_ids")
    if types is not None and max(map(max, types)) >= config.type_vocab_size:
        types = None  # RoBERTa's and those of a model without segments
    labels = [float(label) for label in split.labels] if regression else list(split.labels)
    return Rows(ids, types, labels, cut, tokenizer.pad_token_id, end_padding(config))


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise unless a tokenizer can be a model's.

    Raises:
        InputError: saying what does not fit.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise InputError(
            "tokenizer", f"it has ids up to {largest}, the model {vocab_size} tokens; it is another model's"
        )
    if tokenizer.pad_token_id is None:
        raise InputError("tokenizer", "it has no padding token ([PAD] in BERT)")
    if tokenizer("text")["input_ids"][0] not in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        raise InputError("tokenizer", "it puts no special token before text ([CLS] in BERT), which is what is read")
