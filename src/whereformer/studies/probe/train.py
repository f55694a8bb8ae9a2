"""One run of a probe: train a small encoder on a task with a method, and judge its answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...data.masks import IGNORED
from ...errors import InputError
from ...lab.training.model_options import about_method
from ...lab.training.optimizer import build_optimizer, linear_schedule
from ...models import EncoderConfig, EncoderForMaskedLM
from ...positions import PositionRangeError
from .results import Cannot, Failed, Run, Score
from .settings import ProbeSettings
from .tasks import PAD, TASKS, VOCABULARY

BASELINE = "none"
"""The method whose weights all models start from; it shows what needs no positions."""
LENGTH_FACTORS = (1, 2, 4)
"""Models are judged on rows of these multiples of the training length."""
JUDGED_ROWS = 512
JUDGED_SEED = 2**62
"""The seed of the rows to judge on, plus their length. No seed of training leads so far."""
TOKENS = 2**15
"""The most tokens that a model reads at a time while it is judged."""
INITIALIZER_RANGE = 0.06
"""Larger than BERT's 0.02, which suits a width of 768, because narrow layers then start to learn sooner."""


def encoder_config(settings: ProbeSettings, position: str) -> EncoderConfig:
    """Return one method's encoder configuration. It has no dropout: rows are new at every step."""
    return EncoderConfig(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_heads,
        intermediate_size=2 * settings.hidden_size,
        blocks=str(settings.layers),
        position=position,
        max_position_embeddings=settings.length + 1,
        norm="pre",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=0,
        layer_norm_eps=1e-6,
        initializer_range=INITIALIZER_RANGE,
        sparse_prediction=True,
    )


def build_model(settings: ProbeSettings, position: str, seed: int) -> EncoderForMaskedLM:
    """Build an untrained model of one method. With the same seed, all methods start from the same backbone weights."""
    torch.manual_seed(seed)
    backbone = EncoderForMaskedLM(encoder_config(settings, BASELINE)).state_dict()
    torch.manual_seed(seed)
    model = EncoderForMaskedLM(encoder_config(settings, position))
    missing = model.load_state_dict(backbone, strict=False).missing_keys
    assert all(name.startswith("encoder.position.") for name in missing), missing
    return model


def check_positions(names: Sequence[str], settings: ProbeSettings) -> list[str]:
    """Return the distinct methods, each built once so that errors appear before any training.

    Raises:
        InputError: if a method is unknown, or does not fit these settings.
    """
    for name in names:
        try:
            with torch.device("meta"):  # where tables of any size take no memory
                EncoderForMaskedLM(encoder_config(settings, name))
        except (ValueError, TypeError) as error:
            raise about_method(error, "positions") from None
    return list(dict.fromkeys(names))


def check_tasks(names: Sequence[str], settings: ProbeSettings) -> list[str]:
    """Return the distinct tasks.

    Raises:
        InputError: if a task is unknown, or needs longer rows.
    """
    for name in names:
        if name not in TASKS:
            raise InputError("tasks", f"unknown task {name!r}; expected some of {', '.join(TASKS)}")
        if settings.length < TASKS[name].shortest:
            raise InputError(
                "length", f"expected at least {TASKS[name].shortest} for the task {name}, got {settings.length}"
            )
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Judged:
    """The rows that all models of a task are judged on at one length, (JUDGED_ROWS, 1 + length) each.

    Args:
        inputs, labels: the rows.
        guessed: whether the best guess without positions is right, at each label.
    """

    inputs: Tensor
    labels: Tensor
    guessed: Tensor

    @classmethod
    def of(cls, task: str, length: int) -> Judged:
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
    model = build_model(settings, position, seed).to(device)
    optimizer = build_optimizer(model, settings.learning_rate)
    schedule = linear_schedule(optimizer, max(1, settings.steps // 10), settings.steps)
    started = time.perf_counter()
    for step in range(settings.steps):
        inputs, labels = TASKS[task].rows(settings.batch_size, settings.length, seed * 1_000_003 + step)
        loss: Tensor = model(inputs.to(device), labels=labels.to(device)).loss
        if not math.isfinite(number := loss.item()):
            return Failed(f"the loss is not a number after {step} steps")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(number)
    seconds = time.perf_counter() - started
    model.eval()
    lengths = [factor * settings.length for factor in LENGTH_FACTORS]
    return Run(seconds, {length: judge(model, Judged.of(task, length)) for length in lengths})


@torch.no_grad()
def judge(model: EncoderForMaskedLM, rows: Judged) -> Score | Cannot:
    """Return how many answers of a model are right, or why it has none at this length."""
    asked = rows.labels != IGNORED
    right = []
    for chosen in torch.arange(len(rows.inputs)).split(max(1, TOKENS // rows.inputs.shape[1])):
        try:
            logits = model(rows.inputs[chosen].to(model.device), labels=rows.labels[chosen].to(model.device)).logits
        except PositionRangeError as error:
            return Cannot(str(error))
        if not logits.isfinite().all():
            return Cannot("the output is not a number at this length")
        right.append(logits.argmax(-1).cpu() == rows.labels[chosen][asked[chosen]])
    correct = torch.zeros_like(asked).masked_scatter(asked, torch.cat(right))
    # Answers in the same row depend on each other, so the rows are what varies.
    gaps = (correct.double() - rows.guessed.double()).sum(1) / asked.sum() * len(asked)
    accuracy = float(correct.sum() / asked.sum())
    return Score(accuracy, float(gaps.mean()), float(gaps.std() / len(gaps) ** 0.5))
