"""One run of a probe: train a small encoder on a task with a method, and judge its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...data.masks import IGNORED
from ...lab.encoders import BASELINE, build_model, small_config
from ...lab.fit import DivergedError, fit
from ...lab.score import Cannot, at_lengths
from ...models import EncoderConfig, EncoderForMaskedLM
from .results import Failed, Run, Score
from .settings import ProbeSettings
from .tasks import PAD, TASKS, VOCABULARY

LENGTH_FACTORS = (1, 2, 4)
"""Models are judged on rows of these multiples of the training length."""
JUDGED_ROWS = 512
JUDGED_SEED = 2**62
"""The seed of the rows to judge on, plus their length. No seed of training leads so far."""
TOKENS = 2**15
"""The most tokens that a model reads at a time while it is judged."""


def encoder_config(settings: ProbeSettings, position: str) -> EncoderConfig:
    """Return one method's encoder configuration. It has no dropout: rows are new at every step."""
    return small_config(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_heads,
        intermediate_size=2 * settings.hidden_size,
        blocks=str(settings.layers),
        position=position,
        max_position_embeddings=settings.length + 1,
    )


@dataclass(frozen=True)
class HeldOutRows:
    """The rows that all models of a task are judged on at one length, (JUDGED_ROWS, 1 + length) each.

    ``guessed`` says at each label whether the best guess without positions is right.
    """

    inputs: Tensor
    labels: Tensor
    guessed: Tensor

    @classmethod
    def of(cls, task: str, length: int) -> HeldOutRows:
        """Draw the rows of a task at one length, which are always the same."""
        inputs, labels = TASKS[task].rows(JUDGED_ROWS, length, JUDGED_SEED + length)
        guess = TASKS[task].guess(inputs[:, 1:], labels[:, 1:])
        return cls(inputs, labels, nn.functional.pad(guess, (1, 0), value=PAD) == labels)

    @property
    def guess(self) -> float:
        """The accuracy of the best guess without positions."""
        return float(self.guessed.sum() / (self.labels != IGNORED).sum())


def train_and_judge(
    task: str, position: str, seed: int, settings: ProbeSettings, device: torch.device, on_step: Callable[[float], None]
) -> Run | Failed:
    """Train a method on a task with a seed, and judge it at every length."""
    config, baseline = (encoder_config(settings, name) for name in (position, BASELINE))
    model = build_model(EncoderForMaskedLM, config, baseline, seed).to(device)
    try:
        fitted = fit(model, batches(task, seed, settings), settings.steps, settings.learning_rate, on_step=on_step)
    except DivergedError as error:
        return Failed(error.problem)
    model.eval()
    lengths = [factor * settings.length for factor in LENGTH_FACTORS]
    return Run(fitted.seconds, at_lengths(lengths, lambda length: judge(model, HeldOutRows.of(task, length))))


def batches(task: str, seed: int, settings: ProbeSettings) -> Iterator[dict[str, Tensor]]:
    """Yield the training rows of each step."""
    for step in range(settings.steps):
        inputs, labels = TASKS[task].rows(settings.batch_size, settings.length, seed * 1_000_003 + step)
        yield {"input_ids": inputs, "labels": labels}


@torch.no_grad()
def judge(model: EncoderForMaskedLM, rows: HeldOutRows) -> Score | Cannot:
    """Return how many answers of a model are right, or why there is no telling.

    Raises:
        PositionRangeError: if the position method has no positions so far out.
    """
    asked = rows.labels != IGNORED
    right = []
    for chosen in torch.arange(len(rows.inputs)).split(max(1, TOKENS // rows.inputs.shape[1])):
        logits = model(rows.inputs[chosen].to(model.device), labels=rows.labels[chosen].to(model.device)).logits
        if not logits.isfinite().all():
            return Cannot("the output is not finite (NaN or inf) at this length")
        right.append(logits.argmax(-1).cpu() == rows.labels[chosen][asked[chosen]])
    correct = torch.zeros_like(asked).masked_scatter(asked, torch.cat(right))
    # Answers in the same row depend on each other, so the rows are what varies.
    gaps = (correct.double() - rows.guessed.double()).sum(1) / asked.sum() * len(asked)
    accuracy = float(correct.sum() / asked.sum())
    return Score(accuracy, float(gaps.mean()), float(gaps.std() / len(gaps) ** 0.5))
