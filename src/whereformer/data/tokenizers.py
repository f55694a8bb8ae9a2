"""Train or load tokenizers for masked language models, and describe their special tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MAX_NAME, InputError, one_line, short_repr
from ..files import check_regular_in

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, _, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that masking and windows need."""

    size: int  # all ids are below this
    pad: int
    cls: int
    sep: int
    mask: int
    special: tuple[int, ...]  # ids that are never predicted and never drawn at random; they include these four

    @cached_property
    def is_ordinary(self) -> Tensor:
        """(size,) bool, True for every id that is not special."""
        ordinary = torch.ones(self.size, dtype=torch.bool)
        ordinary[list(self.special)] = False
        return ordinary

    @cached_property
    def ordinary(self) -> Tensor:
        """The ids that are not special, in ascending order."""
        return self.is_ordinary.nonzero().flatten()


MAX_SPECIAL_SHARE = 0.5
"""The largest share of a text's tokens that may be unknown or otherwise special, which are never predicted."""
LETTER_COVERAGE = 0.9995
"""The share of a text's letters that a trained vocabulary covers. The rest are too rare to deserve tokens
(SentencePiece's ``character_coverage`` has the same default)."""


def build_vocabulary(size: int) -> Vocabulary:
    """Return the vocabulary of :func:`fit_tokenizer`: the special tokens come first."""
    return Vocabulary(size, PAD, CLS, SEP, MASK, tuple(range(len(SPECIAL_TOKENS))))


def fit_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a lower-casing WordPiece tokenizer with BERT's rules. It may have fewer tokens than ``vocab_size``.

    The rarest letters, 0.05% of all, get no token, nor do letters beyond half of ``vocab_size``. A word with such a
    letter is ``[UNK]``. ``texts`` are read twice, one after another.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def build_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS[1]))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    tokenizer = build_tokenizer({})
    # The trainer numbers single characters in an order that changes from run to run, and breaks ties by number, so
    # even the set of tokens would change. Characters that are passed first, in order, have fixed numbers.
    letters = _common_letters(tokenizer, texts, vocab_size // 2)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *letters],
        limit_alphabet=0,  # only these letters
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokens = (*SPECIAL_TOKENS, *sorted(tokenizer.get_vocab().keys() - set(SPECIAL_TOKENS)))
    ordered = build_tokenizer({token: index for index, token in enumerate(tokens)})
    cls, sep = SPECIAL_TOKENS[CLS], SPECIAL_TOKENS[SEP]
    ordered.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=[(cls, CLS), (sep, SEP)]
    )
    names = dict(zip(ROLES, SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=ordered, model_input_names=["input_ids", "attention_mask"], **names)


def _common_letters(tokenizer: Tokenizer, texts: Iterable[str], limit: int) -> list[str]:
    """Return the most frequent letters that cover ``LETTER_COVERAGE`` of all, in order, at most ``limit``.

    A letter within a word is a different piece from one at its beginning. Marks and the like are never within a word.
    """
    letters: Counter[str] = Counter()
    for text in texts:
        letters.update(tokenizer.normalizer.normalize_str(text))
    for space in filter(str.isspace, [*letters]):
        del letters[space]
    needed, common = LETTER_COVERAGE * letters.total(), list[str]()
    for letter, count in sorted(letters.items(), key=lambda item: (-item[1], item[0])):
        words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(f"a{letter}"))
        pieces = [letter] if len(words) > 1 else [letter, f"##{letter}"]
        if needed <= 0 or len(common) + len(pieces) > limit:
            break
        common += pieces
        needed -= count
    return sorted(common)


def read_tokenizer(path_or_id: str | Path, field: str) -> PreTrainedTokenizerBase:
    """Read a tokenizer from a folder or from the Hub; an InputError for ``field`` if it can't be read."""
    from transformers import AutoTokenizer

    try:
        check_regular_in(field, path_or_id)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path_or_id, trust_remote_code=False)
        tokenizer("text")  # some entries of its files are first read here
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one without any file
            raise ValueError("it has no vocabulary")
        for name in ("is_local", "local_files_only"):  # how it was read, which save_pretrained would write
            tokenizer.init_kwargs.pop(name, None)
    except InputError:
        raise
    except Exception as error:
        # For a missing or broken file, the libraries raise all kinds of errors, even a plain Exception.
        reason = getattr(error, "strerror", None) or one_line(str(error))[:200] or type(error).__name__
        if "tiktoken" in reason:  # transformers tries it on any .model file that it could not read
            reason = "its sentencepiece model can't be read; this needs `pip install sentencepiece`"
        name = short_repr(str(path_or_id), MAX_NAME)
        raise InputError(field, f"no tokenizer can be read from {name} ({reason})") from None
    return tokenizer


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer to pretrain with, from a folder.

    Raises:
        InputError: if the folder has no tokenizer, or the tokenizer lacks a special token that pretraining needs.
    """
    if not path.is_dir():
        name = short_repr(str(path), MAX_NAME)
        raise InputError("tokenizer", f"expected the folder of a saved tokenizer, got {name}")
    tokenizer: PreTrainedTokenizerFast = read_tokenizer(path, "tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("tokenizer", f"{path} has no tokenizer.json; save it as a fast tokenizer")
    # Later steps cut the text into windows and pad them.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    for role, name in zip(ROLES, SPECIAL_TOKENS, strict=True):
        if role != "unk_token" and getattr(tokenizer, f"{role}_id") is None:
            raise InputError("tokenizer", f"{path} has no {role}, which pretraining needs ({name} in BERT)")
    return tokenizer


def check_predictable(tokenizer: PreTrainedTokenizerBase, counts: Tensor, text_name: str) -> None:
    """Raise an InputError for ``data`` if most tokens of a text are unknown or otherwise special: nothing to learn.

    ``counts``, (tokens,), says how often each token occurs in the text.
    """
    special = {number: int(counts[number]) for number in {*tokenizer.all_special_ids} if number < len(counts)}
    total = int(counts.sum())
    if sum(special.values()) >= MAX_SPECIAL_SHARE * total:
        share = special.get(tokenizer.unk_token_id, 0) / max(1, total)
        problem = (
            f"too little to predict in {text_name}: {share:.1%} of its tokens are {tokenizer.unk_token or 'unknown'}"
        )
        raise InputError("data", f"{problem} (rare letters, or text without spaces); use other text")


def read_vocabulary(tokenizer: PreTrainedTokenizerFast, field: str) -> Vocabulary:
    """Return a tokenizer's ids that windows need; an InputError for ``field`` if fewer than 2 of them are ordinary."""
    ids = tokenizer.get_vocab().values()
    special = tuple(sorted(set(tokenizer.all_special_ids)))
    num_ordinary = len(ids) - len(special)
    if num_ordinary < 2:
        expected = f"expected at least 2 different tokens besides {', '.join(SPECIAL_TOKENS)}"
        raise InputError(field, f"{expected}, got {num_ordinary}")
    pad, _, cls, sep, mask = (getattr(tokenizer, f"{role}_id") for role in ROLES)
    return Vocabulary(max(ids) + 1, pad, cls, sep, mask, special)
