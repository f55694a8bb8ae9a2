"""Choose the encoded pairs of lines that are short enough, and put them into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...data import subwords
from ...data.streams import RowFile
from ...errors import InputError
from ...models.seq2seq.smoothed import IGNORED
from .parallel import PARTS, ParallelText, open_or_encode
from .results import PairFacts, TranslationFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def collate(pairs: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
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
    """The prepared text: the pairs to train on and to judge by, the vocabulary, and facts about them.

    A pair is a row of two parts, source and target, each with its end token.
    """

    training: RowFile
    held_out: RowFile
    tokenizer: PreTrainedTokenizerFast
    facts: TranslationFacts


def prepare(text: ParallelText, vocab_size: int, max_length: int, cache: Path) -> TranslationText:
    """Open the encoded pairs or encode them, and leave those with an empty or too long line out.

    Args:
        text: the text.
        vocab_size: size of the vocabulary, which is learned from the training pairs.
        max_length: the most tokens in a line.
        cache: the folder of encoded texts.

    Raises:
        InputError: if no pair is left, and as :func:`whereformer.studies.translate.parallel.open_or_encode` does.
    """
    encoded = open_or_encode(cache, text, vocab_size)
    found: dict[str, RowFile] = {}
    facts: dict[str, PairFacts] = {}
    for name, source, rows in zip(PARTS, text.sources, (encoded.training, encoded.held_out), strict=True):
        full = (rows.lengths > 0).all(1)
        fits = full & (rows.lengths <= max_length).all(1)
        if not fits.any():
            part = name.replace("_", "-")
            wanted = f"text on both sides and at most {max_length} tokens on each"
            raise InputError("max_length", f"no {part} pair of {source} has {wanted}")
        found[name] = rows.chosen(fits.nonzero().flatten())
        lengths = found[name].lengths
        facts[name] = PairFacts(
            pairs=len(lengths),
            empty=len(rows) - int(full.sum()),
            too_long=int(full.sum()) - len(lengths),
            source_tokens=int(lengths[:, 0].sum()),
            target_tokens=int(lengths[:, 1].sum()),
            longest=int(lengths.max()),
        )
    about = TranslationFacts(text.sources[0], **facts, vocabulary=len(encoded.tokenizer))
    return TranslationText(**found, tokenizer=encoded.tokenizer, facts=about)
