"""Score a masked language model on held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ...data.masks import IGNORED, HeldOut

if TYPE_CHECKING:
    from ...models import EncoderForMaskedLM


def unigram_entropy(training: Tensor, held_out: Tensor) -> float:
    """Return the held-out loss, in nats, of guessing by token frequency: what a model without context can reach.

    Args:
        training, held_out: (tokens,), how often each token of the vocabulary occurs in these parts of the text.
    """
    counts = training.double() + 1.0
    return float(-((counts / counts.sum()).log() * held_out).sum() / held_out.sum())


@dataclass(frozen=True)
class HeldOutScore:
    """Held-out masked-LM quality: mean loss in nats, accuracy from 0 to 1, and the loss of every predicted token."""

    loss: float
    accuracy: float
    losses: Tensor


@torch.no_grad()
def evaluate(model: EncoderForMaskedLM, held_out: HeldOut, length: int, tokens_per_batch: int = 8192) -> HeldOutScore:
    """Score ``model`` (built with ``sparse_prediction``) on held-out text in windows of ``length`` tokens."""
    was_training = model.training
    model.eval()
    losses, right = [], 0
    for inputs, labels, mask in held_out.windows(length, tokens_per_batch):
        # Without padding there is nothing to mask, and attention is faster without a mask.
        attention_mask = None if bool(mask.all()) else mask.to(model.device)
        wanted = labels[labels != IGNORED].to(model.device)
        logits = model(inputs.to(model.device), attention_mask, labels=labels.to(model.device)).logits.float()
        losses.append(functional.cross_entropy(logits, wanted, reduction="none").cpu())
        right += int((logits.argmax(-1) == wanted).sum())
    model.train(was_training)
    every = torch.cat(losses)
    return HeldOutScore(float(every.mean()), right / len(every), every)
