"""Tokenize labeled rows, and put them into padded batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError
from ..manifest import fingerprint
from ..positions import PositionRangeError
from .glue import Split
from .streams import iter_chunks
from .windows import count_end_padding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models import EncoderConfig, EncoderForSequenceClassification

CHUNK = 1024
"""Number of rows that are tokenized at a time."""


@dataclass(frozen=True)
class Rows:
    """The tokenized rows of a split."""

    rows: list[tuple[array[int], array[int]]]  # the token ids of each row, and their types
    has_types: bool  # whether the tokenizer gives types and the model has them
    labels: list[float]  # the label of each row
    num_truncated: int  # number of rows that were truncated
    pad: int  # the id of padding
    end: int = 0  # padding tokens after even the longest row of a batch; a funnel that truncates drops them

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each row, (rows, 1)."""
        return torch.tensor([[len(ids)] for ids, _ in self.rows])

    def collate(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return a batch of padded rows, (rows, tokens of the longest row plus ``end``), and their labels (rows,)."""
        lengths = torch.tensor([len(self.rows[number][0]) for number in numbers])
        width = int(lengths.max()) + self.end
        batch = {}
        for index, (name, filler) in enumerate({"input_ids": self.pad, "token_type_ids": 0}.items()):
            if name == "input_ids" or self.has_types:
                parts = [self.rows[number][index].tolist() for number in numbers]
                batch[name] = torch.tensor([part + [filler] * (width - len(part)) for part in parts])
        if int(lengths.min()) < width:
            batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
        return {**batch, "labels": torch.tensor([self.labels[number] for number in numbers])}


def fingerprint_rows(splits: Iterable[Rows], weights: str) -> str:
    """Return a short hash of all tokens and labels of a task, and of the weights of the model that reads them."""
    return fingerprint([weights, *(repr((split.labels, split.rows)) for split in splits)])


def tokenize(split: Split, tokenizer: PreTrainedTokenizerBase, max_length: int | None, config: EncoderConfig) -> Rows:
    """Tokenize the rows of a split, with all processors. Rows have the tokenizer's special tokens around text.

    Rows of more than ``max_length`` tokens are truncated, the longer text of a pair first; None truncates none. The
    model's configuration says how many token types it has, and whether its poolings drop the end of a row.
    """
    # The tokenizer's own limit does not matter: the model checks whether rows fit.
    options = {"return_attention_mask": False, "verbose": False}
    rows: list[tuple[array[int], array[int]]] = []
    num_truncated = num_types = 0
    for chunk in iter_chunks(split.texts, CHUNK):
        texts = [[*side] for side in zip(*chunk, strict=True)]
        output = tokenizer(*texts, **options)
        is_longer = [max_length is not None and len(row) > max_length for row in output["input_ids"]]
        if any(is_longer):
            output = tokenizer(*texts, truncation=True, max_length=max_length, **options)
        ids = output["input_ids"]
        types = output.get("token_type_ids") or [[]] * len(ids)
        num_truncated += sum(is_longer)
        num_types = max(num_types, *(1 + max(row, default=-1) for row in types))
        rows += [(array("i", row), array("i", row_types)) for row, row_types in zip(ids, types, strict=True)]
    # Without types in the model, as with RoBERTa, or from the tokenizer, there are none.
    has_types = 0 < num_types <= config.type_vocab_size
    return Rows(rows, has_types, split.labels, num_truncated, tokenizer.pad_token_id, count_end_padding(config))


def check_lengths(model: EncoderForSequenceClassification, splits: Sequence[Rows]) -> None:
    """Let a model read the longest row. If it is too long for the model, raise an InputError for ``max_length``."""
    widest = max(splits, key=lambda split: int(split.lengths.max()))
    longest = widest.collate([int(widest.lengths.argmax())])
    del longest["labels"]
    try:
        with torch.no_grad():
            model(**longest)
    except PositionRangeError as error:
        limit = model.config.max_position_embeddings - widest.end
        problem = f"the longest row has {int(widest.lengths.max())} tokens; set `max_length` {limit} to truncate it"
        raise InputError("max_length", f"{problem} ({error})") from None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise an InputError if a tokenizer's ids are too large for a model with ``vocab_size`` tokens, or if it lacks a
    padding token or a special token before text."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        problem = f"token id {largest}, but the vocabulary has {vocab_size} tokens"
        raise InputError("tokenizer", f"it does not match the model: {problem}")
    if tokenizer.pad_token_id is None:
        raise InputError("tokenizer", "it has no padding token ([PAD] in BERT)")
    if tokenizer("text")["input_ids"][0] not in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        raise InputError("tokenizer", "it puts no special token before text ([CLS] in BERT), which the model reads")
