"""The joint vocabulary for translation: byte-pair encoding over bytes, which covers every script."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .streams import in_lots

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAD, START, END = range(len(SPECIAL_TOKENS))
LEAST = 300
"""Size of the smallest vocabulary: the special tokens, all 256 bytes, and some tokens of several bytes."""


def fit(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a vocabulary on the texts of both languages. It may end up smaller than ``vocab_size``.

    Text is normalized: Unicode NFC, one space for each run of white space, none at the ends. Case is kept. Pieces
    consist of bytes, so nothing is unknown, and decoding gives the normalized text back, spaces included. A source ends
    with ``</s>``; a target begins with ``<s>`` and ends with ``</s>``. Names of special tokens in text are plain text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    # With the space, a word at the beginning of a line is the same piece as elsewhere.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        # A piece that occurs once would only be memorised.
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = SPECIAL_TOKENS[END]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    return _described(tokenizer)


def load(path: Path) -> PreTrainedTokenizerFast:
    """Load the ``tokenizer.json`` of a vocabulary that :func:`fit` has made."""
    from tokenizers import Tokenizer

    return _described(Tokenizer.from_file(str(path)))


def _described(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers, with the roles of its special tokens."""
    from transformers import PreTrainedTokenizerFast

    pad, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        model_input_names=["input_ids", "attention_mask"],
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Lines:
    """Encoded lines in one tensor, because lists of Python integers take several times the memory.

    Args:
        ids: (tokens,) int32, the ids of all lines.
        starts: (lines + 1,), where each line begins, then the end of the last line.
    """

    ids: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, line: int) -> Tensor:
        return self.ids[int(self.starts[line]) : int(self.starts[line + 1])]

    @property
    def lengths(self) -> Tensor:
        """(lines,), the number of tokens of each line."""
        return self.starts.diff()

    def chosen(self, lines: Tensor) -> Lines:
        """Return the lines at the indices ``lines``, (chosen,), in this order."""
        lengths = self.lengths[lines]
        starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
        # A token's distance from the start of its line does not change.
        places = torch.arange(int(starts[-1])) + (self.starts[:-1][lines] - starts[:-1]).repeat_interleave(lengths)
        return Lines(self.ids[places], starts)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Lines:
    """Encode the texts, each followed by the end token."""
    ids, ends = array("i"), [0]
    for lot in in_lots(texts, 1024):
        for line in encode_lot(tokenizer, lot):
            ids.extend(line)
            ends.append(len(ids))
    tokens = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
    return Lines(tokens, torch.tensor(ends))


def encode_lot(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Encode some texts with all processors; return the ids of each, with the end token."""
    backend = tokenizer.backend_tokenizer
    # Loading a tokenizer sets this; building one does not.
    backend.encode_special_tokens = True
    return [encoded.ids for encoded in backend.encode_batch_fast(texts)]
