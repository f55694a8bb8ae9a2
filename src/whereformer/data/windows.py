"""Masked windows of a token stream. The seed and a row's number decide where the row starts and what is masked.

A training reads them in stages: short windows for most of the steps, then longer ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import InputError, shown
from ..lab.options import MOST_SIZE
from .masks import HELD_OUT_RATE, mask_tokens
from .streams import Stream
from .tokenizers import Vocabulary

if TYPE_CHECKING:
    from ..models import EncoderConfig

SHORTEST = 8
"""The least tokens in a window."""
HELD_OUT_WINDOWS = 1024
"""The most held-out windows that are scored; more would only take time."""


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


@dataclass(frozen=True)
class Stage:
    """Steps in a row with windows of one length, ``rows`` of them in each step."""

    length: int
    steps: int
    rows: int


def parsed_lengths(text: str) -> list[tuple[int, float]]:
    """Parse lengths with their shares of the steps, such as "128:0.9,512:0.1".

    Raises:
        InputError: for ``lengths``, if the text is something else, or the shares do not add up to 1.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = [(int(length), float(share)) for length, share in pairs]
    except ValueError:
        expected = "expected lengths and shares such as '128:0.9,512:0.1'"
        raise InputError("lengths", f"{expected}, got {shown(text)}") from None
    for length, share in found:
        if not (SHORTEST <= length <= MOST_SIZE and 0 < share <= 1):
            expected = f"expected lengths of {SHORTEST} to {MOST_SIZE} and shares above 0 and up to 1"
            raise InputError("lengths", f"{expected}, got {shown(f'{length}:{share:g}')}")
    total = sum(share for _, share in found)
    if abs(total - 1) > 1e-6:
        raise InputError("lengths", f"expected shares that add up to 1, got {total:g} in {shown(text)}")
    return found


def stages_of(lengths: Sequence[tuple[int, float]], steps: int, batch_size: int, batches: int) -> list[Stage]:
    """Divide the steps among the lengths, each with its share. All steps have about the same number of tokens.

    A step has ``batches`` batches of ``batch_size`` windows of the first length. Of longer windows a batch has fewer,
    but at least one.

    Raises:
        InputError: for ``lengths``, if a length gets no step.
    """
    ends = [round(share * steps) for share in accumulate(share for _, share in lengths)]
    found = []
    for (length, _), (start, end) in zip(lengths, pairwise([0, *ends]), strict=True):
        if start == end:
            raise InputError("lengths", f"expected at least one step of each length, got none of {length} in {steps}")
        rows = max(1, round(batch_size * lengths[0][0] / length))
        found.append(Stage(length, end - start, rows * batches))
    return found


@dataclass(frozen=True)
class StagedWindows:
    """The windows of all steps of a training, and those that it is scored on.

    Args:
        training, held_out: the streams.
        vocabulary: the tokenizer's special and ordinary ids.
        stages: the stages, in order. Their windows have consecutive numbers.
        padding: how many tokens at the end of each window are not text.
        rate: share of masked tokens in training.
        hide_masked: whether attention skips [MASK].
        seed: seed of places and masks in training.
        uniforms: whether windows have the random numbers that ELECTRA takes.

    Raises:
        InputError: for ``data``, if a stream is shorter than a window.
    """

    training: Stream
    held_out: Stream
    vocabulary: Vocabulary
    stages: Sequence[Stage]
    padding: int
    rate: float
    hide_masked: bool
    seed: int
    uniforms: bool

    def __post_init__(self) -> None:
        for stage in self.stages:
            body = body_length(stage.length, self.padding)
            for name, stream in (("training", self.training), ("held-out", self.held_out)):
                if len(stream) < body:
                    expected = f"expected at least {body} for one window; give more text or shorter windows"
                    raise InputError("data", f"too little text: {len(stream)} {name} tokens, {expected}")

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return all windows of a step as one batch."""
        for stage, windows in self._training:
            if step < stage.steps:
                return collate([windows[row] for row in range(step * stage.rows, (step + 1) * stage.rows)])
            step -= stage.steps
        raise IndexError(step)

    @cached_property
    def _training(self) -> list[tuple[Stage, Windows]]:
        found, first = [], 0
        for stage in self.stages:
            rows = range(first, first + stage.steps * stage.rows)
            drawn = {"rate": self.rate, "seed": self.seed, "shuffled": True}
            found.append((stage, self._windows(self.training, stage.length, rows, **drawn)))
            first = rows.stop
        return found

    def scored(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches of held-out windows of the last length: always the same, whatever training uses."""
        last = self.stages[-1]
        most = min(HELD_OUT_WINDOWS, len(self.held_out) // body_length(last.length, self.padding))
        drawn = {"rate": HELD_OUT_RATE, "seed": 0, "shuffled": False}
        windows = self._windows(self.held_out, last.length, range(most), **drawn)
        for first in range(0, most, last.rows):
            yield collate([windows[row] for row in range(first, min(first + last.rows, most))])

    def _windows(self, stream: Stream, length: int, rows: range, **drawn: Any) -> Windows:
        return Windows(
            stream,
            self.vocabulary,
            length=length,
            padding=self.padding,
            hide_masked=self.hide_masked,
            rows=rows,
            uniforms=self.uniforms,
            **drawn,
        )

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding, that all steps read."""
        return sum(stage.steps * stage.rows * (stage.length - self.padding) for stage in self.stages)

    @property
    def passes(self) -> float:
        """How many times all steps read the text."""
        text = len(self.training)
        return sum(
            stage.steps * stage.rows / (text // body_length(stage.length, self.padding)) for stage in self.stages
        )
