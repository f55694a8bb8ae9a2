"""Held-out scores: means over all batches, however they are divided among processes, and the loss of each token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.masks import IGNORED
from ..models import Electra, EncoderForCausalLM, Seq2SeqForConditionalGeneration
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
    counts: dict[type[nn.Module], Any] = {Electra: _electra, Seq2SeqForConditionalGeneration: _translation}
    found, count = [], counts.get(type(model), _masked_lm)
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


def _masked_lm(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with the number of tokens summed: loss in nats and right answers over the masked tokens."""
    wanted = batch["labels"].flatten()[label_places(batch["labels"], model.config.label_share)]
    logits = model(**batch).logits.float()
    count = int((wanted != IGNORED).sum())
    loss = functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORED)
    return [("loss", float(loss), count), ("accuracy", float((logits.argmax(-1) == wanted).sum()), count)]


def _translation(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with the number of tokens summed: loss in nats and right answers over the next tokens."""
    out, asked = model(**batch), batch["labels"] != IGNORED
    count, right = int(asked.sum()), float((out.logits.argmax(-1) == batch["labels"])[asked].sum())
    return [("loss", float(out.loss) * count, count), ("accuracy", right, count)]


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
def lm_score(model: Any, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> HeldOutScore:
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
