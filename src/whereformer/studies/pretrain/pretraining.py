"""A masked LM or ELECTRA that is pretrained on windows of text: its windows, its length, its scores and its plan."""

from __future__ import annotations

from collections.abc import Iterator
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

from ...analysis import cost
from ...data.encode import EncodedText
from ...data.masks import HELD_OUT_RATE, IGNORED
from ...data.streams import Stream
from ...data.windows import Windows, body_length, collate, end_padding
from ...errors import InputError
from ...lab import ranks
from ...lab.sheet import Column, Sheet
from ...lab.training.folder import Folder
from ...lab.training.long_run import Course, Judge, LongTraining
from ...lab.training.optimizer import build_optimizer, build_schedule
from ...lab.training.shared import Batch, Count, shared_loader
from ...models import ElectraPretrainingConfig, EncoderConfig
from .model import build_model, count_parameters
from .results import PretrainPlan, PretrainResults
from .schedule import Stage, StagedBatches
from .settings import ModelSettings, PretrainTraining

HELD_OUT_WINDOWS = 1024
"""The most held-out windows that are scored; more would only take time."""


@dataclass(frozen=True)
class Pretraining(LongTraining[PretrainResults]):
    """A pretraining on encoded text, checked when it is created.

    Raises:
        InputError: if the text or a window is too short.
    """

    model: ModelSettings
    training: PretrainTraining
    text: EncodedText
    config: EncoderConfig
    device: torch.device
    every: int
    keep: int

    def __post_init__(self) -> None:
        field = "lengths" if self.training.lengths else "length"
        for length in (stage.length for stage in self.stages):
            if (body := body_length(length, self.padding)) < 4:
                least = f"at least {6 + self.padding} for blocks {self.config.blocks!r}"
                raise InputError(field, f"expected {least}, got {length}")
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

    @cached_property
    def padding(self) -> int:
        """Tokens at the end of each window that are not text."""
        return end_padding(self.config)

    def rows_per_pass(self, length: int) -> int:
        """Return the number of windows of this length in the training text."""
        return len(self.text.training) // body_length(length, self.padding)

    def windows_read(self, step: int) -> Iterator[tuple[Stage, int]]:
        """Return the number of windows of each stage that have been read after this step."""
        for stage in self.stages:
            steps = min(step, stage.steps)
            step -= steps
            yield stage, steps * stage.rows_per_step

    def epochs(self, step: int) -> float:
        """Return how many times the text has been read after this step."""
        return sum(rows / self.rows_per_pass(stage.length) for stage, rows in self.windows_read(step))

    def tokens_seen(self, step: int) -> int:
        """Return the number of tokens, without padding, that have been read after this step."""
        return sum(rows * (stage.length - self.padding) for stage, rows in self.windows_read(step))

    @property
    def course(self) -> Course:
        return Course(self.training.steps, self.every, self.epochs, self.tokens_seen)

    @cached_property
    def plan(self) -> PretrainPlan:
        first = self.stages[0]
        return PretrainPlan(
            **count_parameters(self.config),
            block_lengths=list(self.config.block_lengths(self.stages[-1].length)),
            tokens_per_step=first.rows_per_step * first.length,
            steps_per_epoch=self.rows_per_pass(first.length) / first.rows_per_step,
            epochs=self.epochs(self.training.steps),
        )

    def sheet(self) -> Sheet:
        facts, plan = self.text.facts, self.plan
        lengths = ", ".join(f"{length:,}" for length in plan.block_lengths)
        rows = [
            ("text", f"{facts.training_tokens:,} training and {facts.held_out_tokens:,} held-out tokens"),
            ("", f"from {facts.source}; guessing by frequency: loss {facts.unigram_entropy:.2f}"),
            ("model", plan.size(facts.vocabulary)),
            ("", f"blocks {self.config.blocks} of {lengths} tokens"),
            ("training", f"{self.training.steps:,} steps of {plan.tokens_per_step:,} tokens; {plan.passes()}"),
        ]
        step = 0
        for stage in self.stages if len(self.stages) > 1 else ():
            what = f"{stage.rows_per_step:,} windows of {stage.length:,} tokens"
            rows.append(("", f"steps {step + 1:,} to {step + stage.steps:,}: {what}"))
            step += stage.steps
        return Sheet.of("Plan", ["", Column("", left=True, wraps=True)], rows)

    def costs(self) -> tuple[str, ...]:
        """Return what a batch of each length costs, for each trained model. Autocast needs less memory."""
        found = []
        for stage in self.stages:
            steps = f" ({stage.batches} batches per step)" if stage.batches > 1 else ""
            length = f" of {stage.length}-token windows" if len(self.stages) > 1 else ""
            targets = max(1, round(self.training.mask_rate * stage.length))
            models = {"model": (self.config, targets)}
            if isinstance(self.config, ElectraPretrainingConfig):
                judge = self.config.discriminator_config()
                models = {"generator": (self.config.generator_config(), targets), "discriminator": (judge, 0)}
            for name, (config, predicted) in models.items():
                batch = cost(config, stage.length, stage.batch_size, predictions=predicted)
                found.append(f"\n{name}, a batch{length}{steps}:\n{batch}")
        return tuple(found)

    def build(self) -> PreTrainedModel:
        return build_model(self.config)

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        training = self.training
        optimizer = build_optimizer(model, training.learning_rate, name=training.optimizer)
        return optimizer, build_schedule(optimizer, training.schedule, training.warmup or 1, training.steps)

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
        rate, seed = self.training.mask_rate, self.training.seed
        parts, first = [], 0
        for stage in self.stages:
            rows = range(first, first + stage.steps * stage.rows_per_step)
            parts.append(self._windows(self.text.training, stage.length, rows, rate=rate, seed=seed, shuffled=True))
            first = rows.stop
        return ConcatDataset(parts)

    def held_out_windows(self) -> Windows:
        """Return the held-out windows, of the last length: always the same rows and masks.

        They do not depend on the seed and the mask rate of training.
        """
        length = self.stages[-1].length
        most = len(self.text.held_out) // body_length(length, self.padding)
        rows = range(min(HELD_OUT_WINDOWS, most))
        return self._windows(self.text.held_out, length, rows, rate=HELD_OUT_RATE, seed=0, shuffled=False)

    def _windows(self, stream: Stream, length: int, rows: range, **drawn: Any) -> Windows:
        return Windows(
            stream,
            self.text.vocabulary,
            length=length,
            padding=self.padding,
            hide_masked=self.training.hide_masked,
            rows=rows,
            uniforms=self.model.objective == "electra",
            **drawn,
        )


def judge_masked_lm(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: loss in nats and accuracy over the masked tokens, the only ones that the model predicts."""
    wanted = batch["labels"][batch["labels"] != IGNORED]
    logits = model(**batch).logits.float()
    loss = functional.cross_entropy(logits, wanted, reduction="sum")
    right = (logits.argmax(-1) == wanted).sum()
    return {"loss": (float(loss), len(wanted)), "accuracy": (float(right), len(wanted))}


def judge_electra(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Score a batch: every mean in :class:`ElectraOutput` but the joint loss, with the number of tokens it covers."""
    out, labels = model(**batch), batch["labels"]
    counts = count_electra(batch)
    counts["accuracy"] = counts["discriminator_loss"]
    counts["replaced_recall"] = int((out.sampled_ids != labels)[labels != IGNORED].sum())
    return {name: (float(out[name]) * count, count) for name, count in counts.items() if count}


def count_masked_lm(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the tokens that a masked LM's loss is a mean over."""
    return {"loss": int((batch["labels"] != IGNORED).sum())}


def count_electra(batch: dict[str, Tensor]) -> dict[str, int]:
    """Count the tokens that each of ELECTRA's losses is a mean over: the targets, and all real tokens."""
    labels = batch["labels"]
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    return {"generator_loss": int((labels != IGNORED).sum()), "discriminator_loss": real}
