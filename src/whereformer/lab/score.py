"""Scores of language models on held-out text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ..data.masks import IGNORED
from ..models import EncoderForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class HeldOutScore:
    """Held-out quality of a language model: mean loss in nats, accuracy from 0 to 1, and every token's loss."""

    loss: float
    accuracy: float
    losses: Tensor


@torch.no_grad()
def lm_score(model: PreTrainedModel, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> HeldOutScore:
    """Score a masked or causal language model on batches: input ids, labels and attention mask, (rows, n) each.

    Causal models predict the first token of a row from nothing, so it may not have a label.
    """
    was_training = model.training
    model.eval()
    losses, right = [], 0
    for inputs, labels, mask in batches:
        # Without padding there is nothing to mask, and attention is faster without a mask.
        attention_mask = None if bool(mask.all()) else mask.to(model.device)
        labeled = labels != IGNORED
        wanted = labels[labeled].to(model.device)
        if isinstance(model, EncoderForCausalLM):
            # The logits at a token are for the next one.
            labeled = functional.pad(labeled[:, 1:], (0, 1))
        logits = model(inputs.to(model.device), attention_mask, labels=labels.to(model.device)).logits
        # With sparse_prediction, there are no others.
        logits = (logits[labeled.to(model.device)] if logits.ndim == 3 else logits).float()
        losses.append(functional.cross_entropy(logits, wanted, reduction="none").cpu())
        right += int((logits.argmax(-1) == wanted).sum())
    model.train(was_training)
    every = torch.cat(losses)
    return HeldOutScore(float(every.mean()), right / len(every), every)
