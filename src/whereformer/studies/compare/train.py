"""One run of a comparison: train a model, score it on held-out text, and record what its heads learned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from ...analysis.curves import OFFSETS_SHOWN, head_curves
from ...analysis.toeplitz import diagonal_means
from ...data.masks import HeldOut
from ...lab.training.finite import check_finite
from ...lab.training.held_out import evaluate
from ...lab.training.optimizer import build_optimizer, linear_schedule
from ...models import EncoderForMaskedLM
from ...positions import PositionRangeError
from .models import build_model, keep_model, model_facts
from .prepare import CompareJob
from .results import Cannot, Run, Score
from .settings import Sizes
from .task import tune
from .windows import GrowingBatches, window_lengths


def train_step(model: EncoderForMaskedLM, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """Take one training step, with the gradient norm clipped to 1, and return the loss as a tensor on the device."""
    loss: Tensor = model(inputs.to(model.device), labels=labels.to(model.device)).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def warmup_steps(sizes: Sizes) -> int:
    """Return the steps in which the learning rate rises: a tenth of them."""
    return max(1, sizes.steps // 10)


def train(
    job: CompareJob, position: str, seed: int, rate: float, warmup: int, on_step: Callable[[float], None]
) -> tuple[EncoderForMaskedLM, list[float], float]:
    """Train a method with a seed and a learning rate, which rises for ``warmup`` steps and then falls to zero.

    Returns:
        The model, the loss of each step, and the seconds of training.

    Raises:
        InputError: for ``learning_rate``, if the loss stops being a number.
    """
    sizes = job.settings
    model = build_model(sizes, position, job.text.vocab_size, seed).to(job.device)
    optimizer = build_optimizer(model, rate)
    schedule = linear_schedule(optimizer, warmup, sizes.steps)
    batches = GrowingBatches(job.batches(seed), window_lengths(sizes.length, sizes.steps))
    started = time.perf_counter()
    losses = []
    for step in range(sizes.steps):
        loss = float(train_step(model, optimizer, *batches[step]))
        check_finite(f"the loss of {position!r}", loss, step, rate)
        schedule.step()
        losses.append(loss)
        on_step(loss)
    return model, losses, time.perf_counter() - started


def train_and_judge(
    job: CompareJob,
    position: str,
    seed: int,
    rate: float,
    held_out: HeldOut,
    on_step: Callable[[float], None],
    folder: Path,
) -> Run:
    """Train a method with a seed and a learning rate, save the model in ``folder``, and judge it.

    With a labeled table, the model is then fine-tuned on its rows, and judged by others.

    Raises:
        InputError: for ``learning_rate``, if a loss is not a number.
    """
    sizes = job.settings
    model, losses, seconds = train(job, position, seed, rate, warmup_steps(sizes), on_step)
    model.eval()
    scores, token_losses = _scores(job, model, position, rate, held_out)
    keep_model(model, folder, model_facts(sizes, position, seed))
    return Run(
        learning_rate=rate,
        seconds=seconds,
        train_loss=_rounded(losses),
        scores=scores,
        # Losses by window, to tell a real difference between two methods from chance in the held-out text.
        window_losses=_rounded(float(part.mean()) for part in token_losses.split(64)),
        positional_parameters=sum(parameter.numel() for parameter in model.encoder.position.parameters()),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        curves=head_curves(model.encoder, sizes.length - 1),
        attention=attention_by_offset(model, held_out, sizes.length),
        task=None if job.rows is None else tune(job.rows, sizes, position, seed, rate, model, on_step),
    )


def _scores(
    job: CompareJob, model: EncoderForMaskedLM, position: str, rate: float, held_out: HeldOut
) -> tuple[dict[int, Score | Cannot], Tensor]:
    """Return the score at every length, and the loss of every token at the training length."""
    sizes = job.settings
    scores: dict[int, Score | Cannot] = {}
    for length in sizes.lengths:
        try:
            score = evaluate(model, held_out, length)
        except PositionRangeError as error:
            scores[length] = Cannot(str(error))
        else:
            check_finite(f"the loss of {position!r}", score.loss, sizes.steps, rate)
            scores[length] = Score(score.loss, score.accuracy)
            if length == sizes.length:
                token_losses = score.losses
    return scores, token_losses


def _rounded(numbers: Iterable[float]) -> list[float]:
    return [round(number, 4) for number in numbers]


@torch.no_grad()
def attention_by_offset(model: EncoderForMaskedLM, held_out: HeldOut, length: int) -> list[list[list[float]] | None]:
    """Return each head's mean attention weight at offsets -16 to 16 on some held-out text, [layer][head][offset].

    It is None for layers between pooled sequences, whose offsets are not offsets between tokens.
    """
    inputs, _, real = next(held_out.windows(length, 2048))
    whole = real.all(-1)
    inputs = inputs[whole] if whole.any() else inputs
    attentions = model.encoder(inputs.to(model.device), output_attentions=True).attentions
    reach = min(OFFSETS_SHOWN, length - 1)
    return [
        diagonal_means(weights).mean(0)[:, length - 1 - reach : length + reach].tolist()
        if weights.shape[-2:] == (length, length)
        else None
        for weights in attentions
    ]
