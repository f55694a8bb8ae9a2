"""A translation model that is trained on pairs of lines: its batches, its length, its scores and its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ...data import batches as drawing
from ...lab import ranks
from ...lab.sheet import Column, Sheet
from ...lab.training.folder import Folder
from ...lab.training.long_run import Course, Judge, LongTraining, judge_all
from ...lab.training.model_options import parameters
from ...lab.training.optimizer import build_optimizer, build_schedule
from ...lab.training.shared import Batch, Count, shared_loader
from ...models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from ...models.seq2seq.smoothed import IGNORED
from .examples import TranslationText, collate
from .model import generation_config
from .results import TranslationPlan, TranslationResults
from .settings import TranslationSettings


@dataclass(frozen=True)
class TranslatorTraining(LongTraining[TranslationResults]):
    """A translation training on encoded pairs.

    Args:
        training: the checked settings.
        text: the prepared text.
        config: the model's configuration.
        device: where to train.
    """

    training: TranslationSettings
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
            epochs=lambda step: step * per_step,
            tokens_seen=lambda step: round(step * per_step * tokens),
        )

    @property
    def pinned(self) -> Sequence[int]:
        """The steps after which the weights are averaged into the final model."""
        judged = (step for step in range(self.course.steps, 0, -1) if self.course.is_judged(step))
        return sorted(islice(judged, self.training.average))

    @cached_property
    def plan(self) -> TranslationPlan:
        """The facts that are known before training."""
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

    def sheet(self) -> Sheet:
        facts, plan, rows = self.text.facts, self.plan, []
        for name, part in (("training", facts.training), ("held-out", facts.held_out)):
            tokens = f"{part.source_tokens:,} and {part.target_tokens:,} tokens, at most {part.longest} per line"
            rows.append((name, f"{part.pairs:,} pairs, {tokens}"))
            empty = [f"{part.empty:,} with an empty line"] * bool(part.empty)
            long = [f"{part.too_long:,} of more than {self.training.max_length} tokens"] * bool(part.too_long)
            if empty or long:
                rows.append(("", f"left out: {', '.join(empty + long)}"))
        rows.append(("model", plan.size(facts.vocabulary)))
        rows.append(("steps", f"{plan.steps:,} of about {plan.tokens_per_step:,} tokens; {plan.passes()}"))
        return Sheet.of("Plan", ["", Column("", left=True, wraps=True)], rows)

    def build(self) -> PreTrainedModel:
        return Seq2SeqForConditionalGeneration(self.config)

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        # No decay, and Adam's epsilon, as in Vaswani et al.
        training = self.training
        optimizer = build_optimizer(model, training.learning_rate, name=training.optimizer, weight_decay=0.0, eps=1e-9)
        return optimizer, build_schedule(optimizer, training.schedule, training.warmup, self.course.steps)

    @property
    def count(self) -> Count:
        return count

    @property
    def judge(self) -> Judge:
        return judge

    def unusable(self, folder: Folder[TranslationResults], step: int, model: nn.Module) -> str | None:
        """Return why a checkpoint can't be used: what is wrong with it, or with an earlier one to average."""
        if (reason := super().unusable(folder, step, model)) is not None:
            return reason
        for earlier in self.pinned:
            if earlier < step and (reason := folder.problem(earlier)) is not None:
                return f"the average also needs {folder.checkpoint(earlier).name}, but {reason}"
        return None

    def finished(
        self, model: Any, folder: Folder[TranslationResults], results: TranslationResults
    ) -> tuple[PreTrainedModel, TranslationResults]:
        """Return the model with the mean of the last checkpoints' weights, and its scores."""
        training = self.training
        if training.average > 1:
            load_mean(model, [folder.checkpoint(step) / "model.safetensors" for step in self.pinned])
            scores = judge_all(model, self.held_out(), judge, self.device, bf16=training.dtype == "bfloat16")
            rounded = {name: round(value, 4) for name, value in scores.items()}
            results = replace(results, averaged={"steps": self.pinned, **rounded})
        model.config.use_cache = True  # the Trainer turns it off
        model.generation_config = generation_config(self.config, training.max_length)
        return model, results

    def batches(self) -> DataLoader[Batch]:
        sampler = _Drawn(self, self.course.steps * self.training.accumulate)
        pairs: Any = self.text.training  # a DataLoader's types ask for a subclass of its own
        return shared_loader(pairs, sampler, collate, pinned=self.device.type == "cuda")

    def held_out(self) -> DataLoader[Batch]:
        drawn = drawing.by_length_and_tokens(self.text.held_out.lengths, self.training.batch_tokens)
        return DataLoader(self.text.held_out, batch_sampler=ranks.share(drawn), collate_fn=collate)  # type: ignore[arg-type]

    def _shuffled(self) -> Iterator[list[int]]:
        return drawing.shuffled_by_tokens(self.text.training.lengths, self.training.batch_tokens, self.training.seed)


class _Drawn:
    """A batch sampler that yields the first ``count`` batches of a training."""

    def __init__(self, training: TranslatorTraining, count: int) -> None:
        self.training, self.count = training, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.training._shuffled(), self.count)


def load_mean(model: nn.Module, files: Sequence[Path]) -> None:
    """Load the mean of the weights in several files into a model."""
    sums: dict[str, Tensor] = {}
    for file in files:
        for name, weight in load_file(file).items():
            sums[name] = sums[name] + weight.double() if name in sums else weight.double()
    # Tied weights are saved once.
    unknown = model.load_state_dict({name: each / len(files) for name, each in sums.items()}, strict=False)[1]
    assert not unknown, unknown


def judge(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: cross-entropy in nats and accuracy of each next token, given those before it."""
    out, labels = model(**batch, use_cache=False), batch["labels"]
    wanted = labels != IGNORED
    count = int(wanted.sum())
    right = (out.logits.argmax(-1) == labels)[wanted].sum()
    return {"loss": (float(out.loss) * count, count), "accuracy": (float(right), count)}


def count(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the target tokens of a batch, which the loss is a mean over."""
    return {"loss": int((batch["labels"] != IGNORED).sum())}
