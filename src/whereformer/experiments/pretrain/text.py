"""The text of a pretraining: its tokenizer and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...data import corpus
from ...data.tokenizers import Vocabulary, fit_tokenizer, load_tokenizer, token_stream, vocabulary_of
from ...training.text import TextFacts, text_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class PretrainingText:
    """The prepared text: a tokenizer and the two streams of its ids."""

    training: Tensor
    held_out: Tensor
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    facts: TextFacts


def prepare_text(documents: Sequence[str], source: str, tokenizer: Path | None, vocab_size: int) -> PretrainingText:
    """Split and encode, with a tokenizer trained on the training part if none is given.

    Args:
        documents: the text.
        source: where it came from, for people.
        tokenizer: the path of one, as :func:`~.windows.load_tokenizer` takes it.
        vocab_size: of the one that is trained.

    Raises:
        InputError: for too little text, or a tokenizer that does not fit.
    """
    training, held_out = corpus.split_documents(documents)
    chosen = fit_tokenizer(training, vocab_size) if tokenizer is None else load_tokenizer(tokenizer)
    vocabulary = vocabulary_of(chosen, "vocab_size" if tokenizer is None else "tokenizer")
    streams = [token_stream(chosen.backend_tokenizer, pieces, vocabulary.sep) for pieces in (training, held_out)]
    facts = text_facts(source, documents, (training, held_out), (streams[0], streams[1]), vocabulary.size)
    return PretrainingText(streams[0], streams[1], chosen, vocabulary, facts)


def tokenizer_setting(path: Path | None, vocab_size: int) -> str:
    """What a run's settings say about the tokenizer.

    Raises:
        InputError: if there is none at ``path``.
    """
    if path is None:
        return f"trained, {vocab_size} tokens"
    return corpus.fingerprint([load_tokenizer(path).backend_tokenizer.to_str()])
