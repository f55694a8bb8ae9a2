"""A masked LM or ELECTRA that is pretrained on windows of text: its windows, its length, its scores and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader
from transformers import PreTrainedModel

from ...analysis import Cost, cost
from ...data.masks import HELD_OUT_RATE, IGNORED
from ...data.streams import Stream
from ...data.windows import Windows, body_length, collate, end_padding
from ...errors import InputError
from ...lab import ranks
from ...lab.sheet import Column, Sheet
from ...lab.training.folder import KEPT_CHECKPOINTS, Folder
from ...lab.training.long_run import Course, Judge, LongTraining
from ...lab.training.optimizer import build_optimizer, linear_schedule
from ...lab.training.shared import Batch, Count, shared_loader
from ...models import ElectraPretrainingConfig, EncoderConfig
from .model import build_model, count_parameters
from .results import PretrainPlan, PretrainResults
from .schedule import Stage, StagedBatches
from .settings import ModelSettings, PretrainTraining
from .text import PretrainingText

HELD_OUT_WINDOWS = 1024
"""The most held-out windows that are scored; more would only take time."""


@dataclass(frozen=True)
class Pretraining(LongTraining[PretrainResults]):
    """A pretraining on encoded text, checked when it is created.

    Args:
        model, training: the settings, with defaults filled in.
        text: the prepared text.
        config: the model's configuration.
        device: where to train.
        every: steps between checkpoints; each checkpoint comes with a held-out score.
        keep: number of newest checkpoints that are kept.

    Raises:
        InputError: if the text or a window is too short.
    """

    model: ModelSettings
    training: PretrainTraining
    text: PretrainingText
    config: EncoderConfig
    device: torch.device
    every: int
    keep: int = KEPT_CHECKPOINTS

    RESULTS = PretrainResults

    def __post_init__(self) -> None:
        padding, field = end_padding(self.config), "lengths" if self.training.lengths else "length"
        for stage in self.stages:
            body = body_length(stage.length, padding)
            if body < 4:
                raise InputError(
                    field, f"expected at least {6 + padding} for blocks {self.config.blocks!r}, got {stage.length}"
                )
            for name, stream in (("training", self.text.training), ("held-out", self.text.held_out)):
                if len(stream) < body:
                    raise InputError(
                        "data",
                        f"too little text: {len(stream)} {name} tokens, expected at least {body} for one window; "
                        f"give more text or a smaller `{field}`",
                    )

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of training, in order: one for each length of windows."""
        return self.training.stages()

    def rows_per_pass(self, length: int) -> int:
        """Return the number of windows of this length in the training text."""
        return len(self.text.training) // body_length(length, end_padding(self.config))

    def epochs(self, step: int) -> float:
        """Return how many times the text has been read after this step."""
        return sum(
            steps * stage.rows_per_step / self.rows_per_pass(stage.length)
            for stage, steps in zip(self.stages, self._steps_until(step), strict=True)
        )

    def tokens_seen(self, step: int) -> int:
        """Return the number of tokens, without padding, that have been read after this step."""
        padding = end_padding(self.config)
        return sum(
            steps * stage.rows_per_step * (stage.length - padding)
            for stage, steps in zip(self.stages, self._steps_until(step), strict=True)
        )

    def _steps_until(self, step: int) -> list[int]:
        """Return how many steps of each stage have been taken after this step."""
        found = []
        for stage in self.stages:
            found.append(min(step, stage.steps))
            step -= found[-1]
        return found

    def plan(self) -> PretrainPlan:
        """Return the facts that are known before training."""
        first = self.stages[0]
        return PretrainPlan(
            **count_parameters(self.config, self.model.objective),
            block_lengths=list(self.config.block_lengths(self.stages[-1].length)),
            tokens_per_step=first.rows_per_step * first.length,
            steps_per_epoch=self.rows_per_pass(first.length) / first.rows_per_step,
            epochs=self.epochs(self.training.steps),
        )

    @property
    def course(self) -> Course:
        training = self.training
        return Course(training.steps, self.every, training.learning_rate, self.epochs, self.tokens_seen)

    @property
    def rows(self) -> int:
        return self.training.batch_size

    def sheet(self) -> Sheet:
        facts, plan = self.text.facts, self.plan()
        lengths = ", ".join(f"{length:,}" for length in plan.block_lengths)
        steps = sum(stage.steps for stage in self.stages)
        rows = [
            ("text", f"{facts.training_tokens:,} training and {facts.held_out_tokens:,} held-out tokens"),
            ("", f"from {facts.source}; guessing by frequency: loss {facts.unigram_entropy:.2f}"),
            ("model", plan.size(facts.vocabulary)),
            ("", f"blocks {self.config.blocks} of {lengths} tokens"),
            ("training", f"{steps:,} steps of {plan.tokens_per_step:,} tokens; {plan.passes()}"),
        ]
        step = 0
        for stage in self.stages if len(self.stages) > 1 else ():
            what = f"{stage.rows_per_step:,} windows of {stage.length:,} tokens"
            rows.append(("", f"steps {step + 1:,} to {step + stage.steps:,}: {what}"))
            step += stage.steps
        return Sheet.of("Plan", ["", Column("", left=True, wraps=True)], rows)

    def costs(self) -> tuple[str, ...]:
        """Return what a batch of each length costs, for each trained model."""
        found = []
        for stage in self.stages:
            for name, batch in batch_costs(self, stage).items():
                steps = f" ({stage.batches} batches per step)" if stage.batches > 1 else ""
                length = f" of {stage.length}-token windows" if len(self.stages) > 1 else ""
                found.append(f"\n{name}, a batch{length}{steps}:\n{batch}")
        return tuple(found)

    def build(self) -> PreTrainedModel:
        return build_model(self.config, self.model.objective)

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        training = self.training
        optimizer = build_optimizer(model, training.learning_rate)
        return optimizer, linear_schedule(optimizer, training.warmup or 1, training.steps)

    def batches(self) -> DataLoader[Batch]:
        pinned = self.device.type == "cuda"
        return shared_loader(self.training_windows(), StagedBatches(self.stages), collate, pinned=pinned)

    def held_out(self) -> DataLoader[Batch]:
        windows = self.held_out_windows()
        judged = BatchSampler(range(len(windows)), self.stages[-1].batch_size, drop_last=False)
        return DataLoader(windows, batch_sampler=ranks.share(list(judged)), collate_fn=collate)

    @property
    def count(self) -> Count:
        return count_masked_lm if self.model.objective == "mlm" else count_electra

    @property
    def judge(self) -> Judge:
        return judge_masked_lm if self.model.objective == "mlm" else judge_electra

    @property
    def factors(self) -> dict[str, float]:
        return {"discriminator_loss": self.model.discriminator_weight or 0.0}

    def means(self, scores: dict[str, float]) -> dict[str, float]:
        weight = self.model.discriminator_weight
        if weight is None:
            return scores
        # The joint loss is not itself a mean: its two parts are means over different tokens.
        return {"loss": scores["generator_loss"] + weight * scores["discriminator_loss"], **scores}

    def finished(
        self, model: Any, folder: Folder[PretrainResults], results: PretrainResults
    ) -> tuple[PreTrainedModel, PretrainResults]:
        trained = model if self.model.objective == "mlm" else model.discriminator
        # The saved model gives logits at every token.
        trained.config.sparse_prediction = False
        vars(trained.config).pop("use_cache", None)  # the Trainer sets it, for decoders
        # What loads the tokenizer truncates to the length that the model was trained at.
        self.text.tokenizer.model_max_length = self.training.longest
        return trained, results

    def training_windows(self) -> ConcatDataset[dict[str, Tensor]]:
        """Return the windows of all steps, stage after stage."""
        parts, first = [], 0
        for stage in self.stages:
            rows = stage.steps * stage.rows_per_step
            parts.append(
                self._windows(
                    self.text.training,
                    length=stage.length,
                    rate=self.training.mask_rate,
                    rows=range(first, first + rows),
                    seed=self.training.seed,
                    shuffled=True,
                )
            )
            first += rows
        return ConcatDataset(parts)

    def held_out_windows(self) -> Windows:
        """Return the held-out windows, of the last length: always the same rows and masks.

        They do not depend on the seed and the mask rate of training.
        """
        length = self.stages[-1].length
        most = len(self.text.held_out) // body_length(length, end_padding(self.config))
        rows = min(HELD_OUT_WINDOWS, most)
        return self._windows(
            self.text.held_out, length=length, rate=HELD_OUT_RATE, rows=range(rows), seed=0, shuffled=False
        )

    def _windows(self, stream: Stream, *, length: int, rate: float, rows: range, seed: int, shuffled: bool) -> Windows:
        return Windows(
            stream,
            self.text.vocabulary,
            length=length,
            padding=end_padding(self.config),
            hide_masked=self.training.hide_masked,
            rate=rate,
            rows=rows,
            seed=seed,
            shuffled=shuffled,
            uniforms=self.model.objective == "electra",
        )


def judge_masked_lm(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: loss in nats and accuracy over the masked tokens, the only ones that the model predicts."""
    wanted = batch["labels"][batch["labels"] != IGNORED]
    logits = model(**batch).logits.float()
    loss = functional.cross_entropy(logits, wanted, reduction="sum")
    right = (logits.argmax(-1) == wanted).sum()
    return {"loss": (float(loss), len(wanted)), "accuracy": (float(right), len(wanted))}


def count_masked_lm(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the tokens that a masked LM's loss is a mean over."""
    return {"loss": int((batch["labels"] != IGNORED).sum())}


def count_electra(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the tokens that each of ELECTRA's losses is a mean over: the targets, and all real tokens."""
    labels = batch["labels"]
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    return {"generator_loss": int((labels != IGNORED).sum()), "discriminator_loss": real}


def judge_electra(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: every mean in :class:`ElectraOutput` but the joint loss, with the number of tokens it covers."""
    out, labels = model(**batch), batch["labels"]
    counts = count_electra(batch)
    counts["accuracy"] = counts["discriminator_loss"]
    counts["replaced_recall"] = int((out.sampled_ids != labels)[labels != IGNORED].sum())
    return {name: (float(out[name]) * count, count) for name, count in counts.items() if count}


def batch_costs(training: Pretraining, stage: Stage) -> dict[str, Cost]:
    """Return the cost of a batch for each trained model, by name. Memory is for float32; autocast needs less."""
    targets = max(1, round(training.training.mask_rate * stage.length))

    def of(config: EncoderConfig, predictions: int) -> Cost:
        return cost(config, stage.length, stage.batch_size, predictions=predictions, device=training.device.type)

    if isinstance(training.config, ElectraPretrainingConfig):
        return {
            "generator": of(training.config.generator_config(), targets),
            "discriminator": of(training.config.discriminator_config(), 0),
        }
    return {"model": of(training.config, targets)}
