"""Masked windows of a token stream. The seed and a window's number decide where it starts and what is masked.

A training reads them in stages: short windows for most of the steps, then longer ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Windows:
    """Windows ``[CLS] text [SEP] [PAD]...`` with masked tokens, each a function of its number and the seed.

    They read the whole stream once in every ``per_pass`` windows, in a random order and cut at different places each
    time. A window has ``input_ids``, ``labels`` (-100 where nothing is predicted) and, if some tokens must not be
    attended to, ``attention_mask``; each has shape (length,). It may also have ``uniforms``, random numbers from 0 to 1
    with which ELECTRA's generator draws its samples.

    Args:
        stream: (tokens,) ids.
        vocabulary: the tokenizer's special and ordinary ids.
        length: tokens per window.
        padding: how many of them are padding at the end; a funnel that truncates drops them.
        rate: share of masked tokens.
        hide_masked: whether attention skips [MASK].
        seed: seed of places and masks.
        uniforms: whether windows have ``uniforms``.
        spread: if given, there are only this number of windows, at most one pass, spread evenly over the stream.
    """

    stream: Stream
    vocabulary: Vocabulary
    length: int
    padding: int = 0
    rate: float = HELD_OUT_RATE
    hide_masked: bool = False
    seed: int = 0
    uniforms: bool = False
    spread: int | None = None

    @property
    def body(self) -> int:
        """The number of text tokens in a window: all but [CLS], [SEP] and the padding after it."""
        return self.length - 2 - self.padding

    @property
    def per_pass(self) -> int:
        """The number of windows that read the stream once."""
        return len(self.stream) // self.body

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids, generator = self.vocabulary, _generator(self.seed, number)
        end = torch.tensor([ids.sep] + [ids.pad] * self.padding)
        tokens = torch.cat((torch.tensor([ids.cls]), self._text(number), end))[None]
        inputs, labels = mask_tokens(tokens, self.rate, ids, generator)
        window = {"input_ids": inputs[0], "labels": labels[0]}
        # Attention is faster without a mask.
        if self.padding or self.hide_masked:
            real = inputs[0] != ids.mask if self.hide_masked else torch.ones(self.length, dtype=torch.bool)
            real[self.length - self.padding :] = False
            window["attention_mask"] = real.long()
        if self.uniforms:
            window["uniforms"] = torch.rand(self.length, generator=generator)
        return window

    def batch(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """Return windows as one batch, (windows, length) each."""
        windows = [self[number] for number in numbers]
        return {name: torch.stack([window[name] for window in windows]) for name in windows[0]}

    def _text(self, number: int) -> Tensor:
        """Return the tokens of text in a window, (body,). After its end, the stream continues at its beginning."""
        if self.spread is not None:
            start = number * self.per_pass // self.spread * self.body
        else:
            order, shift = _order(self.seed, number // self.per_pass, self.per_pass, len(self.stream))
            start = (int(order[number % self.per_pass]) * self.body + shift) % len(self.stream)
        text = self.stream[start : start + self.body]
        return torch.cat((text, self.stream[: self.body - len(text)])) if len(text) < self.body else text


@lru_cache(maxsize=2)
def _order(seed: int, number: int, windows: int, tokens: int) -> tuple[Tensor, int]:
    """Return the order of the windows in a pass, and where in a stream of so many tokens the first one starts."""
    generator = _generator(seed, -1 - number)
    shift = int(torch.randint(tokens, (), generator=generator))
    return torch.randperm(windows, generator=generator), shift


def _generator(seed: int, number: int) -> torch.Generator:
    """Return the random generator of a window or, for a negative number, of the order of a pass."""
    # torch's CPU generator uses only 32 bits of a seed, so all bits of both numbers are hashed into 32.
    mixed = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big"))


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


def growing(length: int, batch_size: int, steps: int) -> list[Stage]:
    """Divide the steps so that windows grow, with the same number of tokens in each step.

    They have SHORTEST tokens in the first 40% of the steps, then twice as many, and so on, and in the last 40%
    ``length`` tokens, of which a step has ``batch_size`` windows. Methods without offsets then learn to use position,
    too.
    """
    between = [doubled for power in range(1, 64) if (doubled := SHORTEST << power) < length]
    shares = {SHORTEST: 0.4, **dict.fromkeys(between, 0.2 / max(1, len(between))), length: 0.4 if between else 0.6}
    ends = [round(share * steps) for share in accumulate(shares.values())]
    ends[-1] = steps
    parts = zip(shares, pairwise([0, *ends]), strict=True)
    return [Stage(n, end - start, batch_size * length // n) for n, (start, end) in parts if end > start]


@dataclass(frozen=True)
class StagedWindows:
    """The windows of all steps of a training, and those that it is scored on.

    Args:
        windows: the windows of training, of any length.
        held_out: the stream to score on.
        stages: the stages, in order. Their windows have consecutive numbers.

    Raises:
        InputError: for ``data``, if a stream is shorter than a window.
    """

    windows: Windows
    held_out: Stream
    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        for stage in self.stages:
            body = self._of(stage).body
            for name, stream in (("training", self.windows.stream), ("held-out", self.held_out)):
                if len(stream) < body:
                    expected = f"expected at least {body} for one window; give more text or shorter windows"
                    raise InputError("data", f"too little text: {len(stream)} {name} tokens, {expected}")

    def _of(self, stage: Stage) -> Windows:
        return replace(self.windows, length=stage.length)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return all windows of a step as one batch."""
        first = 0
        for stage in self.stages:
            if step < stage.steps:
                first += step * stage.rows
                return self._of(stage).batch(range(first, first + stage.rows))
            step, first = step - stage.steps, first + stage.steps * stage.rows
        raise IndexError(step)

    def scored(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches of held-out windows of the last length: always the same, whatever training uses."""
        last = self.stages[-1]
        windows = replace(self._of(last), stream=self.held_out, rate=HELD_OUT_RATE, seed=0)
        count = min(HELD_OUT_WINDOWS, windows.per_pass)
        for first in range(0, count, last.rows):
            yield replace(windows, spread=count).batch(range(first, min(first + last.rows, count)))

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding, that all steps read."""
        return sum(stage.steps * stage.rows * (stage.length - self.windows.padding) for stage in self.stages)

    @property
    def passes(self) -> float:
        """How many times all steps read the text."""
        return sum(stage.steps * stage.rows / self._of(stage).per_pass for stage in self.stages)
