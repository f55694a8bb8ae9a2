"""The joint vocabulary for translation: byte-pair encoding over bytes, which covers every script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .streams import iter_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAD, START, END = range(len(SPECIAL_TOKENS))
CHUNK = 1024
"""The number of lines that are encoded at a time."""


def fit(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a vocabulary on the texts of both languages. It may end up smaller than ``vocab_size``.

    Text is normalized: Unicode NFC, one space for each run of white space, none at the ends. Case is kept. Pieces
    consist of bytes, so nothing is unknown, and decoding gives the normalized text back, spaces included. A source ends
    with ``</s>``; a target begins with ``<s>`` and ends with ``</s>``. Names of special tokens in text are plain text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

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
        # A piece that occurs once would only be memorized.
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    pad, start, end = SPECIAL_TOKENS
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        model_input_names=["input_ids", "attention_mask"],
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the ids of each text, with the end token. All processors encode together."""
    backend = tokenizer.backend_tokenizer
    # Loading a tokenizer sets this; building one does not.
    backend.encode_special_tokens = True
    for chunk in iter_chunks(texts, CHUNK):
        yield from (encoded.ids for encoded in backend.encode_batch_fast(chunk))
