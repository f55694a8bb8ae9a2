"""Held-out scores: means over all batches, however they are divided among processes, and the loss of each token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.windows import IGNORED
from ..models import Electra, EncoderForCausalLM
from ..models.heads import label_places
from . import ranks


@torch.no_grad()
def held_out_scores(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, bfloat16: bool = False
) -> dict[str, float]:
    """Return mean scores by name, "loss" first. Afterwards the model is in evaluation mode.

    Args:
        model: an :class:`EncoderForMaskedLM` with ``sparse_prediction``, an :class:`Electra`, or a translation model.
        batches: all batches, on the CPU, the same in each process. Each process computes its share of them.
        bfloat16: whether to compute in it.
    """
    model.eval()
    device = next(model.parameters()).device
    found, count = [], _electra if isinstance(model, Electra) else _tokens
    for batch in list(batches)[ranks.rank() :: ranks.size()]:
        moved = {name: each.to(device) for name, each in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            found += count(model, moved)
    scores = means(found)
    if isinstance(model, Electra):  # its loss is not itself a mean: the two parts are means over different tokens
        weight = model.config.discriminator_weight
        return {"loss": scores["generator_loss"] + weight * scores["discriminator_loss"], **scores}
    return scores


def means(found: list[tuple[str, float, int]]) -> dict[str, float]:
    """Return means by name over all processes, of what each has found: a name, a sum, and how many were summed."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, value, count in chain.from_iterable(ranks.gather(found)):
        sums[name][0] += value
        sums[name][1] += count
    return {name: value / count for name, (value, count) in sums.items()}


def _tokens(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with the number of tokens summed: loss in nats and right answers over the predicted tokens."""
    losses, right = _each_token(model, batch)
    return [("loss", float(losses.sum()), len(losses)), ("accuracy", float(right.sum()), len(losses))]


def _electra(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with the number of tokens summed: every mean in :class:`ElectraOutput` but the joint loss."""
    out, labels = model(**batch), batch["labels"]
    targets = labels != IGNORED
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    counts = {"generator_loss": int(targets.sum()), "discriminator_loss": real, "accuracy": real}
    counts["replaced_recall"] = int((targets & (out.sampled_ids != labels)).sum())
    return [(name, float(out[name]) * count, count) for name, count in counts.items() if count]


class HeldOutScore(NamedTuple):
    """Held-out quality of a language model: mean loss in nats, accuracy from 0 to 1, and every token's loss."""

    loss: float
    accuracy: float
    losses: Tensor


@torch.no_grad()
def lm_score(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> HeldOutScore:
    """Score a masked or causal language model on batches of its inputs, with labels.

    Causal models predict the first token of a row from nothing, so it may not have a label.
    """
    was_training = model.training
    model.eval()
    found = [_each_token(model, {name: each.to(model.device) for name, each in batch.items()}) for batch in batches]
    model.train(was_training)
    losses, right = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    return HeldOutScore(float(losses.mean()), float(right.double().mean()), losses)


def _each_token(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss in nats of each predicted token of a batch, (tokens,), and whether the answer is right."""
    logits, labels = model(**batch).logits, batch["labels"]
    places = label_places(labels, getattr(model.config, "label_share", None))
    wanted = labels.flatten()[places]
    if logits.ndim == 3:  # of all tokens, without sparse_prediction
        # Those of a causal model are for the next token.
        logits = logits.flatten(0, 1)[places - int(isinstance(model, EncoderForCausalLM))]
    losses = functional.cross_entropy(logits.float(), wanted, reduction="none", ignore_index=IGNORED)
    real = wanted != IGNORED
    return losses[real], (logits.argmax(-1) == wanted)[real]
