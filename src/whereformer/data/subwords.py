"""The joint vocabulary of translation: byte-pair encoding over bytes, so that it covers every script."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAD, START, END = range(len(SPECIAL_TOKENS))
LEAST = 300
"""Tokens of the smallest vocabulary: the special ones, all 256 bytes, and some that are more than a byte."""


def fit(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a vocabulary on the texts of both languages; it may end up smaller than asked.

    Text is normalised: Unicode's NFC, any run of white space is one space, none at the ends. Case stays. Pieces are of
    bytes, so nothing is unknown, and decoding gives the normalised text back, its spaces included. A source is followed
    by ``</s>``; a target is begun by ``<s>`` and ended by ``</s>``. Names of special tokens in text are text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    # With the space a word is the same piece at the beginning as elsewhere.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        # What is there once only would be learned by heart.
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = SPECIAL_TOKENS[END]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
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
    """Encoded lines in one tensor, since lists of Python's numbers take several times the memory.

    Args:
        ids: (tokens,) int32, of all lines.
        starts: (lines + 1,), where each begins, and the end of the last.
    """

    ids: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, line: int) -> Tensor:
        return self.ids[int(self.starts[line]) : int(self.starts[line + 1])]

    @property
    def lengths(self) -> Tensor:
        """(lines,), tokens of each."""
        return self.starts.diff()

    def chosen(self, lines: Tensor) -> Lines:
        """Some of them (chosen,), in this order."""
        lengths = self.lengths[lines]
        starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
        # Where each of the tokens was: as far from its line's start as it is now.
        places = torch.arange(int(starts[-1])) + (self.starts[:-1][lines] - starts[:-1]).repeat_interleave(lengths)
        return Lines(self.ids[places], starts)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Lines:
    """The texts with the token that ends each."""
    backend = tokenizer.backend_tokenizer
    # Loading a tokenizer sets this; one that has just been made lacks it.
    backend.encode_special_tokens = True
    ids, ends = array("i"), [0]
    for start in range(0, len(texts), 1024):
        for encoded in backend.encode_batch_fast(texts[start : start + 1024]):
            ids.extend(encoded.ids)
            ends.append(len(ids))
    tokens = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
    return Lines(tokens, torch.tensor(ends))
