"""Plan a translation training: its batches, its number of steps and its size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ...data import batches
from ...lab import ranks
from ...lab.training.judged import Course
from ...lab.training.model_options import parameters
from ...lab.training.shared import shared_loader
from ...models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from .examples import TranslationText, collate
from .results import TranslationPlan
from .settings import TranslationTraining, TranslatorSettings


@dataclass(frozen=True)
class TranslationJob:
    """Everything that a translation training needs, already checked.

    Args:
        model, training: the checked settings.
        text: the prepared text.
        config: the model's configuration.
        device: where to train.
    """

    model: TranslatorSettings
    training: TranslationTraining
    text: TranslationText
    config: Seq2SeqConfig
    device: torch.device

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches in the first epoch; other epochs have about the same number."""
        count, left = 0, len(self.text.training)
        for batch in self._shuffled():
            count, left = count + 1, left - len(batch)
            if not left:
                break
        return count

    @cached_property
    def course(self) -> Course:
        """The length of the training, and what its steps mean."""
        training = self.training
        per_step = training.accumulate / self.batches_per_epoch
        steps = training.steps or max(1, math.ceil((training.epochs or 0) / per_step))
        tokens = int(self.text.training.lengths.sum())
        return Course(
            steps=steps,
            every=training.every or max(1, steps // 20),
            learning_rate=training.learning_rate,
            epochs=lambda step: step * per_step,
            tokens_seen=lambda step: round(step * per_step * tokens),
        )

    @property
    def averaged_steps(self) -> list[int]:
        """The steps after which the weights are averaged into the final model."""
        judged = (step for step in range(self.course.steps, 0, -1) if self.course.is_judged(step))
        return sorted(islice(judged, self.training.average))

    def plan(self) -> TranslationPlan:
        """Return the facts that are known before training."""
        with torch.device("meta"):
            counts = parameters(Seq2SeqForConditionalGeneration(self.config))
        return TranslationPlan(
            **counts,
            embedding_parameters=self.config.vocab_size * self.config.hidden_size,
            steps=self.course.steps,
            tokens_per_step=self.course.tokens_seen(1),
            steps_per_epoch=self.batches_per_epoch / self.training.accumulate,
            epochs=self.course.epochs(self.course.steps),
        )

    def training_batches(self) -> DataLoader[dict[str, Tensor]]:
        """Return this process's share of the batches of all steps."""
        sampler = _Drawn(self, self.course.steps * self.training.accumulate)
        pinned = self.device.type == "cuda"
        return shared_loader(self.text.training, sampler, collate, pinned=pinned)

    def held_out_batches(self) -> DataLoader[dict[str, Tensor]]:
        """Return this process's batches of the held-out pairs. Each pair is in a batch of one process."""
        drawn = batches.by_length_and_tokens(self.text.held_out.lengths, self.training.batch_tokens)
        return DataLoader(self.text.held_out, batch_sampler=ranks.share(drawn), collate_fn=collate)  # type: ignore[arg-type]

    def _shuffled(self) -> Iterator[list[int]]:
        return batches.shuffled_by_tokens(self.text.training.lengths, self.training.batch_tokens, self.training.seed)


class _Drawn:
    """A batch sampler that yields the first ``count`` batches."""

    def __init__(self, job: TranslationJob, count: int) -> None:
        self.job, self.count = job, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.job._shuffled(), self.count)


def settings_of(
    model: TranslatorSettings, training: TranslationTraining, text: str, device: torch.device
) -> dict[str, Any]:
    """Return everything that decides a result. All runs in a folder share it. ``text`` is the text's hash."""
    return {**asdict(model), **asdict(training), "text": text, "device": device.type}
