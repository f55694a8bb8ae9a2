"""Windows of a token stream, masked as BERT does, for training and for evaluation.

A training may read them in stages: short windows for most of the steps, then longer ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError
from .streams import Stream, read_windows
from .tokenizers import Vocabulary

if TYPE_CHECKING:
    from ..models import EncoderConfig

IGNORED = -100
"""The label of tokens that are not predicted."""
MIN_LENGTH = 8
"""The smallest number of tokens in a window."""
HELD_OUT_RATE = 0.15
"""The share of held-out tokens that are masked, whatever rate training uses."""
MAX_HELD_OUT_WINDOWS, HELD_OUT_TOKENS = 1024, 8192
"""The largest number of held-out windows that score a training (more would only take time), and of their tokens in a
batch."""


def mask_tokens(
    tokens: Tensor, rate: float, vocabulary: Vocabulary, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mask tokens as BERT does: of the chosen tokens, 80% become [MASK], 10% a random token, and 10% stay.

    Args:
        tokens: (batch, n) ids; special tokens are never chosen.
        rate: share of each row that is chosen; at least one token is.
        vocabulary: the tokenizer's special and ordinary ids.
        generator: the source of all randomness.

    Returns:
        input ids and labels, (batch, n) each; labels are -100 where nothing is predicted.
    """
    noise = torch.rand(tokens.shape, generator=generator)
    ordinary = vocabulary.is_ordinary[tokens]
    count = max(1, round(rate * tokens.shape[1]))
    chosen = torch.zeros_like(ordinary).scatter_(1, (noise * ordinary).topk(count, -1).indices, True) & ordinary
    fate = torch.rand(tokens.shape, generator=generator)
    random_indices = torch.randint(len(vocabulary.ordinary), tokens.shape, generator=generator)
    random_tokens = vocabulary.ordinary[random_indices]
    masked = torch.where(fate < 0.8, vocabulary.mask, torch.where(fate < 0.9, random_tokens, tokens))
    return torch.where(chosen, masked, tokens), torch.where(chosen, tokens, IGNORED)


@dataclass(frozen=True)
class Stage:
    """Steps in a row with windows of one length, ``rows`` of them in each step."""

    length: int
    steps: int
    rows: int


@dataclass(frozen=True)
class Windows:
    """Windows ``[CLS] text`` of a stream, for all steps of a training.

    They read the stream in several passes, each in another random order and cut at other offsets. Only the seed and the
    step decide which windows a step reads, and which tokens are masked.

    Raises:
        InputError: for ``data``, if the stream is shorter than a window.
    """

    stream: Stream  # (tokens,) ids
    vocabulary: Vocabulary  # the tokenizer's special and ordinary ids
    stages: Sequence[Stage]  # of the training, in order
    # Share of masked tokens; None masks none, and every token is a label, as causal models take them.
    rate: float | None = HELD_OUT_RATE
    seed: int = 0  # of the order, the cuts and the masks
    end: tuple[int, ...] = ()  # the ids after the text: [SEP], and padding, which a funnel that truncates drops
    hide_masked: bool = False  # whether attention skips [MASK]
    uniforms: bool = False  # whether batches have `uniforms`

    def __post_init__(self) -> None:
        longest = max(map(self.body, self.stages))
        if len(self.stream) < longest:
            expected = f"expected at least {longest} for one window; give more text or shorter windows"
            raise InputError("data", f"too little text: a part of it has {len(self.stream)} tokens, {expected}")

    def body(self, stage: Stage) -> int:
        """The number of text tokens in a window: all except [CLS] and the tokens after the text."""
        return stage.length - 1 - len(self.end)

    @property
    def padding(self) -> int:
        """The number of tokens after [SEP]."""
        return max(0, len(self.end) - 1)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return all windows of a step, counted from 0, as one batch.

        It has ``input_ids``, ``labels`` (-100 where nothing is predicted) and, if some tokens must not be attended to,
        ``attention_mask``; each has shape (rows, length). It may also have ``uniforms``, random numbers from 0 to 1
        for the samples of ELECTRA's generator.
        """
        ends = [0, *accumulate(stage.steps for stage in self.stages)]
        number = next(number for number, end in enumerate(ends[1:]) if step < end)
        stage, first = self.stages[number], (step - ends[number]) * self.stages[number].rows
        body, stop, starts = self.body(stage), first + stage.rows, list[int]()
        windows = max(1, len(self.stream) // body - 1)  # in a pass
        for text_pass in range(first // windows, (stop - 1) // windows + 1):
            order, shift = _order(self.seed, number, text_pass, windows, len(self.stream) - windows * body)
            begun = text_pass * windows
            starts += (order[max(0, first - begun) : stop - begun] * body + shift).tolist()
        return self._masked(read_windows(self.stream, starts, body), _generator(self.seed, step))

    def held_out_windows(self, stream: Stream) -> Windows:
        """Return the windows of a held-out stream, of the last stage's length; the training's seed does not matter."""
        length = self.stages[-1].length
        count = min(MAX_HELD_OUT_WINDOWS, max(1, len(stream) // self.body(self.stages[-1]) - 1))
        rows = min(count, max(1, HELD_OUT_TOKENS // length))
        return replace(self, stream=stream, stages=[Stage(length, count // rows, rows)], rate=HELD_OUT_RATE, seed=0)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of all steps."""
        return map(self.batch, range(sum(stage.steps for stage in self.stages)))

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding, that all steps read."""
        return sum(stage.steps * stage.rows * (stage.length - self.padding) for stage in self.stages)

    @property
    def passes(self) -> float:
        """How many times all steps read the text."""
        return sum(stage.steps * stage.rows * self.body(stage) for stage in self.stages) / len(self.stream)

    def _masked(self, text: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the batch of some texts, (rows, body)."""
        ids, rows = self.vocabulary, len(text)
        end = torch.tensor(self.end, dtype=torch.long)
        tokens = torch.cat((torch.full((rows, 1), ids.cls), text, end.expand(rows, -1)), 1)
        if self.rate is None:
            return {"input_ids": tokens, "labels": tokens}
        inputs, labels = mask_tokens(tokens, self.rate, ids, generator)
        batch = {"input_ids": inputs, "labels": labels}
        # Attention is faster without a mask.
        if self.padding or self.hide_masked:
            token_mask = inputs != ids.mask if self.hide_masked else torch.ones_like(inputs, dtype=torch.bool)
            token_mask[:, tokens.shape[1] - self.padding :] = False
            batch["attention_mask"] = token_mask.long()
        if self.uniforms:
            batch["uniforms"] = torch.rand(tokens.shape, generator=generator)
        return batch


@lru_cache(maxsize=2)
def _order(seed: int, stage: int, text_pass: int, windows: int, left: int) -> tuple[Tensor, int]:
    """Return the order of the windows in a pass, and the number of tokens, at most ``left``, that it skips first."""
    generator = _generator(seed, stage, text_pass)
    return torch.randperm(windows, generator=generator), int(torch.randint(left + 1, (), generator=generator))


def _generator(*numbers: int) -> torch.Generator:
    """Return the random generator for a seed and a step, or for a seed, a stage and a pass."""
    # torch's CPU generator uses only 32 bits of a seed, so all bits of the numbers are hashed into 32.
    mixed = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big"))


def count_end_padding(config: EncoderConfig) -> int:
    """Return the number of [PAD] tokens that end a window: a truncating funnel drops them instead of text."""
    # Imported here because models take a second to import.
    from ..models import parse_blocks

    poolings = len(parse_blocks(config.blocks)) - 1
    return 2**poolings - 1 if config.separate_cls and config.truncate_seq else 0


def growing_stages(length: int, batch_size: int, steps: int) -> list[Stage]:
    """Divide the steps into stages with longer and longer windows, and the same number of tokens in each step.

    They have MIN_LENGTH tokens in the first 40% of the steps, then twice that number, and so on, and in the last 40%
    ``length`` tokens, with ``batch_size`` windows per step. Methods without offsets then learn to use position, too.
    """
    between = [doubled for power in range(1, 64) if (doubled := MIN_LENGTH << power) < length]
    shares = {MIN_LENGTH: 0.4, **dict.fromkeys(between, 0.2 / max(1, len(between))), length: 0.4 if between else 0.6}
    lengths = shares if length > MIN_LENGTH else {length: 1.0}
    ends = [0, *(min(round(share * steps), steps - 1) for share in accumulate([*lengths.values()][:-1])), steps]
    counts = (end - start for start, end in pairwise(ends))
    return [
        Stage(size, count, batch_size * length // size) for size, count in zip(lengths, counts, strict=True) if count
    ]
