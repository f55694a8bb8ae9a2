"""Prepare the text of a pretraining: split it, train or load a tokenizer, and encode."""

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
    """The encoded text: its training and held-out streams, (tokens,) ids each, with tokenizer and facts."""

    training: Tensor
    held_out: Tensor
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    facts: TextFacts


def prepare_text(documents: Sequence[str], source: str, tokenizer: Path | None, vocab_size: int) -> PretrainingText:
    """Split and encode the text. If no tokenizer is given, train one on the training part.

    Args:
        documents: the text.
        source: where it comes from, for people to read.
        tokenizer: the path of a tokenizer, as :func:`whereformer.data.tokenizers.load_tokenizer` takes it, or None.
        vocab_size: vocabulary size of the tokenizer that is trained.

    Raises:
        InputError: if there is too little text, or the tokenizer is not suitable.
    """
    training, held_out = corpus.split_documents(documents)
    chosen = fit_tokenizer(training, vocab_size) if tokenizer is None else load_tokenizer(tokenizer)
    # A vocabulary that is learned is too small only if the text has too few different letters.
    vocabulary = vocabulary_of(chosen, "data" if tokenizer is None else "tokenizer")
    streams = [token_stream(chosen.backend_tokenizer, pieces, vocabulary.sep) for pieces in (training, held_out)]
    facts = text_facts(source, documents, (training, held_out), (streams[0], streams[1]), vocabulary.size)
    return PretrainingText(streams[0], streams[1], chosen, vocabulary, facts)


def tokenizer_setting(path: Path | None, vocab_size: int) -> str:
    """Return the entry for the tokenizer in a run's settings.

    Raises:
        InputError: if there is no tokenizer at ``path``.
    """
    if path is None:
        return f"trained, {vocab_size} tokens"
    return corpus.fingerprint([load_tokenizer(path).backend_tokenizer.to_str()])
