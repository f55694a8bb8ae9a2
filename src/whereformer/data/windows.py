"""Masked windows of a token stream. The seed and a row's number decide where the row starts and what is masked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .masks import mask_tokens
from .streams import Stream
from .tokenizers import Vocabulary

if TYPE_CHECKING:
    from ..models import EncoderConfig


class Windows(Dataset[dict[str, Tensor]]):
    """Rows ``[CLS] text [SEP] [PAD]...`` with masked tokens, each a function of its number and the seed.

    Shuffled rows read the whole stream once in every ``per_pass`` rows, cut at different places each time. Rows that
    are not shuffled are spread evenly over the stream. An item has ``input_ids``, ``labels`` (-100 where nothing is
    predicted) and, if some tokens must not be attended to, ``attention_mask``; each has shape (length,). It
    may also have ``uniforms``, random numbers from 0 to 1 with which ELECTRA's generator draws its samples.

    Args:
        stream: (tokens,) ids.
        vocabulary: the tokenizer's special and ordinary ids.
        length: tokens per row.
        padding: how many of them are padding at the end; a funnel that truncates drops them.
        rate: share of masked tokens.
        hide_masked: whether attention skips [MASK].
        rows: the numbers of the rows; at most one pass, from 0 on, if they are not shuffled.
        seed: seed of places and masks.
        shuffled: whether each pass has a random order of its own.
        uniforms: whether items have ``uniforms``.
    """

    def __init__(
        self,
        stream: Stream,
        vocabulary: Vocabulary,
        *,
        length: int,
        padding: int,
        rate: float,
        hide_masked: bool,
        rows: range,
        seed: int,
        shuffled: bool,
        uniforms: bool = False,
    ) -> None:
        self.stream = stream
        self.vocabulary = vocabulary
        self.body = body_length(length, padding)
        self.per_pass = len(stream) // self.body
        self.padding = padding
        self.rate = rate
        self.hide_masked = hide_masked
        self.rows = rows
        self.seed = seed
        self.shuffled = shuffled
        self.uniforms = uniforms
        self.order: tuple[int, Tensor, int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        row = self.rows[row]
        ids = self.vocabulary
        end = torch.tensor([ids.sep] + [ids.pad] * self.padding)
        tokens = torch.cat((torch.tensor([ids.cls]), self._text(row), end))[None]
        generator = self._generator(row)
        inputs, labels = mask_tokens(tokens, self.rate, ids, generator)
        item = {"input_ids": inputs[0], "labels": labels[0]}
        # Attention is faster without a mask.
        if self.padding or self.hide_masked:
            real = inputs[0] != ids.mask if self.hide_masked else torch.ones(tokens.shape[1], dtype=torch.bool)
            real[tokens.shape[1] - self.padding :] = False
            item["attention_mask"] = real.long()
        if self.uniforms:
            item["uniforms"] = torch.rand(tokens.shape[1], generator=generator)
        return item

    def _text(self, row: int) -> Tensor:
        """Return the tokens of text in a row, (body,). After its end, the stream continues at its beginning."""
        start = self._start(row) % len(self.stream)
        text = self.stream[start : start + self.body]
        return torch.cat((text, self.stream[: self.body - len(text)])) if len(text) < self.body else text

    def _start(self, row: int) -> int:
        """Return the place in the stream where a row starts, or a place that many lengths of the stream later."""
        if not self.shuffled:
            return row * self.per_pass // len(self.rows) * self.body
        number, index = divmod(row, self.per_pass)
        if self.order is None or self.order[0] != number:
            generator = self._generator(-1 - number)
            shift = int(torch.randint(len(self.stream), (), generator=generator))
            self.order = number, torch.randperm(self.per_pass, generator=generator), shift
        return int(self.order[1][index]) * self.body + self.order[2]

    def _generator(self, number: int) -> torch.Generator:
        """Return the random generator of a row or, for a negative number, of the order of a pass."""
        # torch's CPU generator uses only 32 bits of a seed, so all bits of both numbers are hashed into 32.
        mixed = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(mixed, "big"))


def body_length(length: int, padding: int) -> int:
    """Return the number of text tokens in a window: all but [CLS], [SEP] and the padding after it."""
    return length - 2 - padding


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Stack windows into a batch."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def end_padding(config: EncoderConfig) -> int:
    """Return how many [PAD] tokens end a window: those that a truncating funnel drops, so that no text is lost."""
    # Imported here because models take a second to import.
    from ..models import parse_blocks

    poolings = len(parse_blocks(config.blocks)) - 1
    return 2**poolings - 1 if config.separate_cls and config.truncate_seq else 0
