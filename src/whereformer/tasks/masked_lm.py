"""Masked language modelling on a stream of text: tokenizer, batches, masks and the held-out score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..models import EncoderForMaskedLM

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, _, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))
IGNORED = -100


@dataclass(frozen=True)
class Vocabulary:
    """The ids that masking and windows need to know of a tokenizer.

    Args:
        size: ids are below it.
        pad, cls, sep, mask: of these tokens.
        special: ids that are never predicted, nor put in at random; these four among them.
    """

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    special: tuple[int, ...]

    @cached_property
    def is_ordinary(self) -> Tensor:
        """(size,), whether an id is none of the special ones."""
        ordinary = torch.ones(self.size, dtype=torch.bool)
        ordinary[list(self.special)] = False
        return ordinary

    @cached_property
    def ordinary(self) -> Tensor:
        """The ids that are not special, ascending."""
        return self.is_ordinary.nonzero().flatten()


def trained_vocabulary(size: int) -> Vocabulary:
    """That of :func:`train_tokenizer`, which numbers the special tokens first."""
    return Vocabulary(size, PAD, CLS, SEP, MASK, tuple(range(len(SPECIAL_TOKENS))))


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A lower-casing WordPiece tokenizer with BERT's rules, trained on ``texts``; it may end up smaller than asked."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    def tokenizer_of(vocabulary: dict[str, int]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS[1]))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    tokenizer = tokenizer_of({})
    # The trainer numbers single characters in an order that changes from run to run and breaks ties by number, so
    # that even the set of tokens would change. Given up front, in order, they have fixed numbers.
    letters: Counter[str] = Counter()
    for text in texts:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)):
            letters.update((word[0], *(f"##{letter}" for letter in word[1:])))
    common = sorted(letters, key=lambda piece: (-letters[piece], piece))[: vocab_size // 2]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL_TOKENS, *sorted(common)], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokens = (*SPECIAL_TOKENS, *sorted(tokenizer.get_vocab().keys() - set(SPECIAL_TOKENS)))
    return tokenizer_of({token: index for index, token in enumerate(tokens)})


def token_stream(tokenizer: Tokenizer, texts: Sequence[str], sep: int = SEP) -> Tensor:
    """All texts as one stream of ids, each followed by ``sep`` and without what the tokenizer would add; (tokens,)."""
    parts = []
    # Some at a time, because lists of Python's numbers take several times the memory of the stream.
    for start in range(0, len(texts), 1024):
        encoded = tokenizer.encode_batch_fast(texts[start : start + 1024], add_special_tokens=False)
        parts.append(torch.tensor([token for text in encoded for token in (*text.ids, sep)]))
    return torch.cat(parts)


def unigram_entropy(training: Tensor, held_out: Tensor, vocab_size: int) -> float:
    """Held-out loss in nats of guessing by frequency alone: where a model stands that uses no context."""
    counts = torch.bincount(training, minlength=vocab_size).double() + 1.0
    return float(-(counts / counts.sum()).log()[held_out].mean())


def mask_tokens(
    tokens: Tensor, rate: float, vocabulary: Vocabulary, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """BERT's masking: of the chosen tokens 80% become [MASK], 10% a random token and 10% stay.

    Args:
        tokens: (batch, n) ids; special tokens are never chosen.
        rate: share of each row that is chosen, at least one token.
        vocabulary: which ids are special.
        generator: decides all that is random.

    Returns:
        input ids and labels, (batch, n) each; a label is -100 where nothing is to be predicted.
    """
    noise = torch.rand(tokens.shape, generator=generator)
    ordinary = vocabulary.is_ordinary[tokens]
    count = max(1, round(rate * tokens.shape[1]))
    chosen = torch.zeros_like(ordinary).scatter_(1, (noise * ordinary).topk(count, -1).indices, True) & ordinary
    fate = torch.rand(tokens.shape, generator=generator)
    drawn = torch.randint(len(vocabulary.ordinary), tokens.shape, generator=generator)
    random_tokens = vocabulary.ordinary[drawn]
    masked = torch.where(fate < 0.8, vocabulary.mask, torch.where(fate < 0.9, random_tokens, tokens))
    return torch.where(chosen, masked, tokens), torch.where(chosen, tokens, IGNORED)


@dataclass(frozen=True)
class Batches:
    """Training batches cut from random places of a stream; which ones is decided by seed and step alone.

    Args:
        stream: (tokens,) ids.
        batch_size: rows.
        length: tokens of a row; the first is [CLS].
        rate: share of masked tokens.
        vocab_size: tokens in the trained vocabulary.
        seed: of places and masks.
    """

    stream: Tensor
    batch_size: int
    length: int
    rate: float
    vocab_size: int
    seed: int

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Input ids and labels of one step, (batch_size, length) each."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        body = self.length - 1
        starts = torch.randint(len(self.stream) - body + 1, (self.batch_size, 1), generator=generator)
        tokens = self.stream[starts + torch.arange(body)]
        tokens = torch.cat((torch.full_like(starts, CLS), tokens), 1)
        return mask_tokens(tokens, self.rate, trained_vocabulary(self.vocab_size), generator)


class HeldOut:
    """Held-out text with one fixed set of masks, so that every method and length predicts the same tokens.

    Args:
        stream: (tokens,) ids.
        rate: share of masked tokens.
        vocab_size: tokens in the trained vocabulary.
    """

    GROUP = 64
    """Masks are spread evenly: the rate holds within every group of so many tokens."""

    def __init__(self, stream: Tensor, rate: float, vocab_size: int) -> None:
        stream = stream[: len(stream) // self.GROUP * self.GROUP]
        generator = torch.Generator().manual_seed(0)
        inputs, labels = mask_tokens(stream.view(-1, self.GROUP), rate, trained_vocabulary(vocab_size), generator)
        self.inputs, self.labels = inputs.flatten(), labels.flatten()

    def windows(self, length: int, tokens_per_batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Input ids, labels and attention mask in batches of windows, each [CLS] and ``length - 1`` tokens."""
        body = length - 1
        missing = -len(self.inputs) % body
        inputs = functional.pad(self.inputs, (0, missing), value=PAD).view(-1, body)
        labels = functional.pad(self.labels, (0, missing), value=IGNORED).view(-1, body)
        inputs = functional.pad(inputs, (1, 0), value=CLS)
        labels = functional.pad(labels, (1, 0), value=IGNORED)
        for rows in torch.arange(len(inputs)).split(max(1, tokens_per_batch // length)):
            yield inputs[rows], labels[rows], inputs[rows] != PAD


@dataclass(frozen=True)
class Score:
    """Held-out masked-LM quality: mean loss in nats, accuracy in 0..1, and the loss of every predicted token."""

    loss: float
    accuracy: float
    losses: Tensor


@torch.no_grad()
def evaluate(model: EncoderForMaskedLM, held_out: HeldOut, length: int, tokens_per_batch: int = 8192) -> Score:
    """Score ``model`` (built with ``sparse_prediction``) on held-out text in windows of ``length`` tokens."""
    was_training = model.training
    model.eval()
    losses, right = [], 0
    for inputs, labels, mask in held_out.windows(length, tokens_per_batch):
        # Without padding there is nothing to mask, and unmasked attention is the faster one.
        attention_mask = None if bool(mask.all()) else mask.to(model.device)
        wanted = labels[labels != IGNORED].to(model.device)
        logits = model(inputs.to(model.device), attention_mask, labels=labels.to(model.device)).logits.float()
        losses.append(functional.cross_entropy(logits, wanted, reduction="none").cpu())
        right += int((logits.argmax(-1) == wanted).sum())
    model.train(was_training)
    every = torch.cat(losses)
    return Score(float(every.mean()), right / len(every), every)
