"""Plan a pretraining: its windows, its length and what a batch costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from ...analysis import Cost, cost
from ...data.masks import HELD_OUT_RATE
from ...data.streams import Stream
from ...data.windows import Windows, body_length, end_padding
from ...errors import InputError
from ...lab.training.folder import KEPT_CHECKPOINTS
from ...models import ElectraPretrainingConfig, EncoderConfig
from .model import count_parameters
from .results import PretrainPlan
from .schedule import Stage, StagedBatches
from .settings import ModelSettings, PretrainTraining
from .text import PretrainingText

HELD_OUT_WINDOWS = 1024
"""The most held-out windows that are scored; more would only take time."""


@dataclass(frozen=True)
class PretrainJob:
    """Everything that a pretraining needs, checked when it is created.

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

    def training_batches(self) -> StagedBatches:
        """Return the rows of each batch of :meth:`training_windows`."""
        return StagedBatches(self.stages)

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


def batch_costs(job: PretrainJob, stage: Stage) -> dict[str, Cost]:
    """Return the cost of a batch for each trained model, by name. Memory is for float32; autocast needs less."""
    targets = max(1, round(job.training.mask_rate * stage.length))

    def of(config: EncoderConfig, predictions: int) -> Cost:
        return cost(config, stage.length, stage.batch_size, predictions=predictions, device=job.device.type)

    if isinstance(job.config, ElectraPretrainingConfig):
        return {
            "generator": of(job.config.generator_config(), targets),
            "discriminator": of(job.config.discriminator_config(), 0),
        }
    return {"model": of(job.config, targets)}


def settings_of(
    model: ModelSettings, training: PretrainTraining, text: str, tokenizer: str, device: torch.device
) -> dict[str, Any]:
    """Return everything that decides a result. All runs in a folder share it.

    ``text`` is the text's hash, and ``tokenizer`` the tokenizer's, or describes how it is trained.
    """
    return {**asdict(model), **asdict(training), "tokenizer": tokenizer, "text": text, "device": device.type}
