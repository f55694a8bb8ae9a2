"""Held-out scores of a masked LM or of ELECTRA: means over all batches, however they are divided among processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.masks import IGNORED
from ..models import Electra
from ..models.heads import label_places
from . import ranks


@torch.no_grad()
def held_out_scores(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, bfloat16: bool = False
) -> dict[str, float]:
    """Return mean scores by name, "loss" first. Afterwards the model is in evaluation mode.

    Args:
        model: an :class:`EncoderForMaskedLM` with ``sparse_prediction``, or an :class:`Electra`.
        batches: all batches, on the CPU, the same in each process. Each process computes its share of them.
        bfloat16: whether to compute in it.
    """
    model.eval()
    device = next(model.parameters()).device
    found = []
    for batch in list(batches)[ranks.rank() :: ranks.size()]:
        moved = {name: each.to(device) for name, each in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            found += _electra(model, moved) if isinstance(model, Electra) else _masked_lm(model, moved)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, value, count in chain.from_iterable(ranks.gather(found)):
        sums[name][0] += value
        sums[name][1] += count
    means = {name: value / count for name, (value, count) in sums.items()}
    if isinstance(model, Electra):  # its loss is not itself a mean: the two parts are means over different tokens
        weight = model.config.discriminator_weight
        return {"loss": means["generator_loss"] + weight * means["discriminator_loss"], **means}
    return means


def _masked_lm(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with the number of tokens summed: loss in nats and right answers over the masked tokens."""
    wanted = batch["labels"].flatten()[label_places(batch["labels"], model.config.label_share)]
    logits = model(**batch).logits.float()
    count = int((wanted != IGNORED).sum())
    loss = functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORED)
    return [("loss", float(loss), count), ("accuracy", float((logits.argmax(-1) == wanted).sum()), count)]


def _electra(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with the number of tokens summed: every mean in :class:`ElectraOutput` but the joint loss."""
    out, labels = model(**batch), batch["labels"]
    targets = labels != IGNORED
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    counts = {"generator_loss": int(targets.sum()), "discriminator_loss": real, "accuracy": real}
    counts["replaced_recall"] = int((targets & (out.sampled_ids != labels)).sum())
    return [(name, float(out[name]) * count, count) for name, count in counts.items() if count]
