"""Judge a model after its positions are replaced: how close its states stay, and how well it does its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ...data.masks import HELD_OUT_RATE, mask_tokens
from ...data.tokenizers import vocabulary_of
from ...errors import InputError
from ...lab.score import lm_score
from ...lab.training.metrics import METRICS
from ...lab.training.trainer import quiet_transformers
from ...models import Encoder, EncoderForMaskedLM, load_pretrained
from ...positions import PositionRangeError
from .pairs import LikenessPairs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 2048
"""About this number of tokens is read at a time."""


@dataclass(frozen=True)
class Judge:
    """The data that all models are judged by.

    Args:
        windows: (rows, n) tokens that the kernels were not fitted to.
        states: (rows, n, hidden_size), the last hidden states of the trained model.
        masked: inputs and labels, (rows, n) each, for masked LM; None if the checkpoint has no head for it.
        pairs: the token rows of each side, and how similar each pair is; None without pairs.
    """

    windows: Tensor
    states: Tensor
    masked: tuple[Tensor, Tensor] | None
    pairs: tuple[list[list[int]], list[list[int]], list[float]] | None

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, encoder: Encoder) -> dict[str, float]:
        """Return a model's scores by name."""
        scores = {
            "similarity": float(functional.cosine_similarity(_states(encoder, self.windows), self.states, -1).mean())
        }
        if self.masked is not None:
            scores |= masked_lm_scores(model, *self.masked)
        if self.pairs is not None:
            first, second, likeness = self.pairs
            cosine = functional.cosine_similarity(_means(encoder, first), _means(encoder, second), -1)
            scores["spearman"] = METRICS["spearman"](np.asarray(likeness), cosine.double().numpy())
        return scores


def masked_lm_scores(model: PreTrainedModel, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the mean loss and the accuracy at the masked tokens of windows, (rows, n) each."""
    parts = (part.split(rows_of_a_batch(part)) for part in (inputs, labels, torch.ones_like(inputs)))
    found = lm_score(model, zip(*parts, strict=True))
    return {"masked_lm_loss": found.loss, "masked_lm_accuracy": found.accuracy}


def load_with_head(path: str, position: str | None, options: dict[str, Any]) -> tuple[PreTrainedModel, Encoder]:
    """Load a model, with its masked-LM head if it has one, and return it with its encoder."""
    with quiet_transformers():
        model = load_pretrained(path, position, **options)
    encoder = model.base_model
    assert isinstance(encoder, Encoder)
    return model, encoder


def make_judge(
    path: str,
    teacher: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    windows: Tensor,
    likeness: LikenessPairs | None,
) -> Judge:
    """Make the judge of models that come from the trained model at ``path``.

    Raises:
        InputError: if the windows are too long for the trained model.
    """
    try:
        states = _states(teacher, windows)
    except PositionRangeError as error:
        raise InputError("length", str(error)) from None
    masked = None
    if isinstance(load_with_head(path, None, {})[0], EncoderForMaskedLM) and tokenizer.mask_token_id is not None:
        masked = masked_windows(windows, tokenizer)
    pairs = None
    if likeness is not None:
        limit = teacher.config.max_position_embeddings
        sides = [tokenizer(side, truncation=True, max_length=limit)["input_ids"] for side in likeness.texts]
        pairs = sides[0], sides[1], likeness.likeness
    return Judge(windows, states, masked, pairs)


def masked_windows(windows: Tensor, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return the inputs and the labels of masked LM on windows, (rows, n) each, with the same masks in every run."""
    return mask_tokens(windows, HELD_OUT_RATE, vocabulary_of(tokenizer, "model"), torch.Generator().manual_seed(0))


@torch.no_grad()
def _states(encoder: Encoder, windows: Tensor) -> Tensor:
    return torch.cat([encoder(rows).last_hidden_state for rows in windows.split(rows_of_a_batch(windows))])


@torch.no_grad()
def _means(encoder: Encoder, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean state of each row's tokens, (rows, hidden_size). Rows are batched by length, without padding."""
    lengths = torch.tensor([len(row) for row in rows])
    means = torch.empty(len(rows), encoder.config.hidden_size)
    for length in lengths.unique().tolist():
        same = (lengths == length).nonzero().squeeze(-1)
        for some in same.split(max(1, BATCH_TOKENS // length)):
            means[some] = encoder(torch.tensor([rows[row] for row in some.tolist()])).last_hidden_state.mean(1)
    return means


def rows_of_a_batch(windows: Tensor) -> int:
    """Return how many of the windows, (rows, n), are read at a time."""
    return max(1, BATCH_TOKENS // windows.shape[1])
