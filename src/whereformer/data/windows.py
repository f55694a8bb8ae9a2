"""Windows of text: which tokenizer, where they start and what is masked, all decided by the seed and a row's number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .masks import mask_tokens
from .tokenizers import Vocabulary

if TYPE_CHECKING:
    from ..models import EncoderConfig


class Windows(Dataset[dict[str, Tensor]]):
    """Rows ``[CLS] text [SEP] [PAD]...`` with masked tokens, each a function of its number and the seed.

    Shuffled rows read the whole stream once in every ``per_pass`` rows, cut at other places each time; other rows are
    spread evenly over it. An item has ``input_ids``, ``labels`` (-100 where nothing is to be predicted) and, where a
    token may not be attended to, ``attention_mask``: (length,) each.

    Args:
        stream: (tokens,) ids.
        vocabulary: of its tokenizer.
        length: tokens of a row.
        padding: of them at the end, which a funnel drops when it truncates.
        rate: share of masked tokens.
        hide_masked: whether [MASK] may not be attended to.
        rows: how many there are; at most one pass if they are not shuffled.
        seed: of places and masks.
        shuffled: whether rows are in an order of their own in every pass.
    """

    def __init__(
        self,
        stream: Tensor,
        vocabulary: Vocabulary,
        *,
        length: int,
        padding: int,
        rate: float,
        hide_masked: bool,
        rows: int,
        seed: int,
        shuffled: bool,
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
        self.order: tuple[int, Tensor, int] | None = None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        start = self._start(row)
        places = torch.arange(start, start + self.body) % len(self.stream)
        ids = self.vocabulary
        end = torch.tensor([ids.sep] + [ids.pad] * self.padding)
        tokens = torch.cat((torch.tensor([ids.cls]), self.stream[places], end))[None]
        inputs, labels = mask_tokens(tokens, self.rate, ids, self._generator(row))
        item = {"input_ids": inputs[0], "labels": labels[0]}
        # Without a mask, attention is faster.
        if self.padding or self.hide_masked:
            real = inputs[0] != ids.mask if self.hide_masked else torch.ones(tokens.shape[1], dtype=torch.bool)
            real[tokens.shape[1] - self.padding :] = False
            item["attention_mask"] = real.long()
        return item

    def _start(self, row: int) -> int:
        """Where in the stream a row starts; behind its end, the stream goes on at its beginning."""
        if not self.shuffled:
            return row * self.per_pass // self.rows * self.body
        number, index = divmod(row, self.per_pass)
        if self.order is None or self.order[0] != number:
            generator = self._generator(-1 - number)
            shift = int(torch.randint(len(self.stream), (), generator=generator))
            self.order = number, torch.randperm(self.per_pass, generator=generator), shift
        return int(self.order[1][index]) * self.body + self.order[2]

    def _generator(self, number: int) -> torch.Generator:
        """What is random in a row, or with a negative number in the order of a pass."""
        # torch's generator on the CPU looks at 32 bits of a seed, so all of both numbers are mixed into those.
        mixed = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(mixed, "big"))


def body_length(length: int, padding: int) -> int:
    """Tokens of text in a window: all but [CLS], [SEP] and the padding behind it."""
    return length - 2 - padding


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """A batch of windows."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def end_padding(config: EncoderConfig) -> int:
    """How many [PAD] end a window: as many as the poolings of a funnel that truncates drop, so that no text is lost."""
    # Here, because models take a second to import.
    from ..models import parse_blocks

    poolings = len(parse_blocks(config.blocks)) - 1
    return 2**poolings - 1 if config.separate_cls and config.truncate_seq else 0
