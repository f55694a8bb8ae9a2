"""Plan a pretraining: its windows, its length and what a batch costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...analysis import Cost, cost
from ...data import corpus
from ...data.masks import HELD_OUT_RATE
from ...data.windows import Windows, body_length, end_padding
from ...errors import InputError
from ...models import ElectraPretrainingConfig, EncoderConfig
from ...training.folder import KEPT_CHECKPOINTS
from .model import count_parameters
from .results import PretrainPlan
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
        length, padding = self.training.length, end_padding(self.config)
        if body_length(length, padding) < 4:
            raise InputError(
                "length", f"expected at least {6 + padding} for blocks {self.config.blocks!r}, got {length}"
            )
        body = self.body
        for name, stream in (("training", self.text.training), ("held-out", self.text.held_out)):
            if len(stream) < body:
                raise InputError(
                    "data",
                    f"too little text: {len(stream)} {name} tokens, expected at least {body} for one window; "
                    "give more text or a smaller `length`",
                )

    @property
    def body(self) -> int:
        """Number of text tokens in a window."""
        return body_length(self.training.length, end_padding(self.config))

    @property
    def rows_per_step(self) -> int:
        """Number of windows in a step."""
        return self.training.batch_size * self.training.accumulate

    @property
    def rows_per_pass(self) -> int:
        """Number of windows in the training text."""
        return len(self.text.training) // self.body

    def plan(self) -> PretrainPlan:
        """Return the facts that are known before training."""
        return PretrainPlan(
            **count_parameters(self.config, self.model.objective),
            block_lengths=list(self.config.block_lengths(self.training.length)),
            tokens_per_step=self.rows_per_step * self.training.length,
            steps_per_epoch=self.rows_per_pass / self.rows_per_step,
            epochs=self.training.steps * self.rows_per_step / self.rows_per_pass,
        )

    def training_windows(self) -> Windows:
        """Return the windows of all steps."""
        return self._windows(
            self.text.training,
            rate=self.training.mask_rate,
            rows=self.training.steps * self.rows_per_step,
            seed=self.training.seed,
            shuffled=True,
        )

    def held_out_windows(self) -> Windows:
        """Return the held-out windows: always the same rows and masks, whatever seed and mask rate training uses."""
        rows = min(HELD_OUT_WINDOWS, len(self.text.held_out) // self.body)
        return self._windows(self.text.held_out, rate=HELD_OUT_RATE, rows=rows, seed=0, shuffled=False)

    def _windows(self, stream: Tensor, *, rate: float, rows: int, seed: int, shuffled: bool) -> Windows:
        return Windows(
            stream,
            self.text.vocabulary,
            length=self.training.length,
            padding=end_padding(self.config),
            hide_masked=self.training.hide_masked,
            rate=rate,
            rows=rows,
            seed=seed,
            shuffled=shuffled,
            uniforms=self.model.objective == "electra",
        )


def batch_costs(job: PretrainJob) -> dict[str, Cost]:
    """Return the cost of a batch for each trained model, by name. Memory is for float32; autocast needs less."""
    training = job.training
    targets = max(1, round(training.mask_rate * training.length))

    def of(config: EncoderConfig, predictions: int) -> Cost:
        length, batch_size, device = training.length, training.batch_size, job.device.type
        return cost(config, length, batch_size, predictions=predictions, device=device)

    if isinstance(job.config, ElectraPretrainingConfig):
        return {
            "generator": of(job.config.generator_config(), targets),
            "discriminator": of(job.config.discriminator_config(), 0),
        }
    return {"model": of(job.config, targets)}


def settings_of(
    model: ModelSettings, training: PretrainTraining, documents: Sequence[str], tokenizer: str, device: torch.device
) -> dict[str, Any]:
    """Return everything that decides a result. All runs in a folder share it.

    ``tokenizer`` is the tokenizer's hash, or describes how it is trained.
    """
    text = corpus.fingerprint(documents)
    return {**asdict(model), **asdict(training), "tokenizer": tokenizer, "text": text, "device": device.type}
