"""Learn a joint vocabulary, tokenize pairs of lines, and put them into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ...data import subwords
from ...data.parallel import Pairs
from ...data.subwords import Lines
from ...errors import InputError
from ...models.seq2seq.smoothed import IGNORED
from .results import PairFacts, TranslationFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Encoded pairs. Each line includes its end token.

    Args:
        source: the source lines.
        target: their translations, one per source line.
    """

    source: Lines
    target: Lines

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.source[row].long(), self.target[row].long()

    @cached_property
    def lengths(self) -> Tensor:
        """(pairs, 2), the number of tokens of source and target."""
        return torch.stack((self.source.lengths, self.target.lengths), 1)


def collate(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Make a batch: ``input_ids``, ``labels`` (-100 after a target's end) and, if any source is padded, their mask."""
    sources, targets = zip(*pairs, strict=True)
    lengths = torch.tensor([len(source) for source in sources])
    batch = {
        "input_ids": pad_sequence(list(sources), batch_first=True, padding_value=subwords.PAD),
        "labels": pad_sequence(list(targets), batch_first=True, padding_value=IGNORED),
    }
    width = batch["input_ids"].shape[1]
    if int(lengths.min()) < width:
        # Attention is faster without a mask.
        batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).long()
    return batch


@dataclass(frozen=True)
class TranslationText:
    """The prepared text: the pairs to train on and to judge by, the vocabulary, and facts about them."""

    training: Examples
    held_out: Examples
    tokenizer: PreTrainedTokenizerFast
    facts: TranslationFacts


def prepare(training: Pairs, held_out: Pairs, vocab_size: int, max_length: int) -> TranslationText:
    """Learn a vocabulary from the training pairs and encode all pairs, without those with an empty or too long line.

    Raises:
        InputError: if no pair is left.
    """
    parts = {"training": training.without_empty(), "held_out": held_out.without_empty()}
    both = (line for side in (parts["training"].source, parts["training"].target) for line in side)
    tokenizer = subwords.fit(both, vocab_size)
    found: dict[str, Examples] = {}
    facts: dict[str, PairFacts] = {}
    for name, pairs in parts.items():
        given = len(training) if name == "training" else len(held_out)
        sides = [subwords.encode(tokenizer, texts) for texts in (pairs.source, pairs.target)]
        fits = (sides[0].lengths <= max_length) & (sides[1].lengths <= max_length)
        if not fits.any():
            raise InputError(
                "max_length",
                f"no {name.replace('_', '-')} pair of {pairs.name} has text on both sides and at most "
                f"{max_length} tokens on each",
            )
        chosen = fits.nonzero().flatten()
        found[name] = Examples(sides[0].chosen(chosen), sides[1].chosen(chosen))
        lengths = found[name].lengths
        facts[name] = PairFacts(
            pairs=len(found[name]),
            empty=given - len(pairs),
            too_long=len(pairs) - len(found[name]),
            source_tokens=int(lengths[:, 0].sum()),
            target_tokens=int(lengths[:, 1].sum()),
            longest=int(lengths.max()),
        )
    about = TranslationFacts(training.name, **facts, vocabulary=len(tokenizer))
    return TranslationText(**found, tokenizer=tokenizer, facts=about)
