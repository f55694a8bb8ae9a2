"""Held-out text and scores: means over all batches, for any number of processes, and the loss of each token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ranks
from ..data.streams import Stream
from ..data.tokenizers import Vocabulary
from ..data.windows import IGNORED, mask_tokens
from ..models import Electra, EncoderForCausalLM
from ..models.heads import label_indices


class HeldOut:
    """Held-out text with one fixed set of masks, so that every method and length predicts the same tokens.

    Args:
        stream: the ids; all of them are kept in memory.
        rate: the share of masked tokens; None masks none, and every token is a label, as in causal models.
        vocabulary: the tokenizer's special and ordinary ids.
    """

    GROUP = 64
    """Masks are spread evenly: the rate holds within every group of this number of tokens."""

    def __init__(self, stream: Stream, rate: float | None, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.inputs = self.labels = stream[: len(stream) // self.GROUP * self.GROUP]
        if rate is not None:
            groups = self.inputs.view(-1, self.GROUP)
            inputs, labels = mask_tokens(groups, rate, vocabulary, torch.Generator().manual_seed(0))
            self.inputs, self.labels = inputs.flatten(), labels.flatten()

    def count_labels(self) -> int:
        """Return the number of predicted tokens, which does not depend on the length of windows."""
        return int((self.labels != IGNORED).sum())

    def windows(self, length: int, tokens_per_batch: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches of windows, each [CLS] and ``length - 1`` tokens of text.

        Yields:
            ``input_ids``, ``labels`` and, if there is padding, ``attention_mask``, each of shape (rows, length), with
            at most ``tokens_per_batch`` tokens per batch, but at least one row.
        """
        body, ids = length - 1, self.vocabulary
        missing = -len(self.inputs) % body
        inputs = functional.pad(self.inputs, (0, missing), value=ids.pad).view(-1, body)
        labels = functional.pad(self.labels, (0, missing), value=IGNORED).view(-1, body)
        inputs = functional.pad(inputs, (1, 0), value=ids.cls)
        labels = functional.pad(labels, (1, 0), value=IGNORED)
        for rows in torch.arange(len(inputs)).split(max(1, tokens_per_batch // length)):
            batch = {"input_ids": inputs[rows], "labels": labels[rows]}
            token_mask = inputs[rows] != ids.pad
            # Attention is faster without a mask.
            yield batch if bool(token_mask.all()) else {**batch, "attention_mask": token_mask.long()}


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
    sums, score_batch = [], _sum_electra if isinstance(model, Electra) else _sum_tokens
    for batch in list(batches)[ranks.rank() :: ranks.size()]:
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            sums += score_batch(model, moved)
    scores = mean_scores(sums)
    if isinstance(model, Electra):  # its loss is not a mean, because its two parts are means over different tokens
        weight = model.config.discriminator_weight
        return {"loss": scores["generator_loss"] + weight * scores["discriminator_loss"], **scores}
    return scores


def mean_scores(sums: list[tuple[str, float, int]]) -> dict[str, float]:
    """Return means by name over all processes, from each process's sums: a name, a sum, and the number of summands."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, value, count in chain.from_iterable(ranks.gather(sums)):
        totals[name][0] += value
        totals[name][1] += count
    return {name: value / count for name, (value, count) in totals.items()}


def _sum_tokens(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with the number of tokens summed: loss in nats and right answers over the predicted tokens."""
    losses, right, _ = _score_tokens(model, batch)
    return [("loss", float(losses.sum()), len(losses)), ("accuracy", float(right.sum()), len(losses))]


def _sum_electra(model: Any, batch: Mapping[str, Tensor]) -> list[tuple[str, float, int]]:
    """Return sums, each with its number of tokens, for every mean in :class:`ElectraOutput` except the joint loss."""
    out, labels = model(**batch), batch["labels"]
    targets = labels != IGNORED
    tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    counts = {"generator_loss": int(targets.sum()), "discriminator_loss": tokens, "accuracy": tokens}
    counts["replaced_recall"] = int((targets & (out.sampled_ids != labels)).sum())
    return [(name, float(out[name]) * count, count) for name, count in counts.items() if count]


class HeldOutScore(NamedTuple):
    """Held-out quality of a language model: mean loss in nats, accuracy from 0 to 1; every token's loss and answer."""

    loss: float
    accuracy: float
    losses: Tensor
    answers: Tensor  # the most likely id


@torch.no_grad()
def lm_score(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> HeldOutScore:
    """Score a masked or causal language model on batches of its inputs, with labels.

    A causal model has nothing to predict the first token of a row from, so that token may not have a label.
    """
    was_training = model.training
    model.eval()
    moved = ({name: tensor.to(model.device) for name, tensor in batch.items()} for batch in batches)
    batch_scores = [_score_tokens(model, batch) for batch in moved]
    model.train(was_training)
    losses, right, answers = (torch.cat(parts).cpu() for parts in zip(*batch_scores, strict=True))
    return HeldOutScore(float(losses.mean()), float(right.double().mean()), losses, answers)


def _score_tokens(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each predicted token of a batch its loss in nats, whether the answer is right, and the answer."""
    logits, labels = model(**batch).logits, batch["labels"]
    indices = label_indices(labels, getattr(model.config, "label_share", None))
    targets = labels.flatten()[indices]
    if logits.ndim == 3:  # of all tokens, without sparse_prediction
        # A causal model predicts the next token.
        logits = logits.flatten(0, 1)[indices - int(isinstance(model, EncoderForCausalLM))]
    losses = functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED)
    has_label, answers = targets != IGNORED, logits.argmax(-1)
    return losses[has_label], (answers == targets)[has_label], answers[has_label]
