"""One run of a comparison: train a model, score it on held-out text, and record what its heads learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...analysis.curves import OFFSETS_SHOWN, head_curves
from ...analysis.toeplitz import diagonal_means
from ...data.masks import HeldOut
from ...lab.fit import Fitted, check_finite, fit
from ...lab.progress import Progress
from ...lab.score import Cannot, HeldOutScore, at_lengths, lm_score
from ...models.heads import EncoderWithLMHead
from .models import keep_model, untrained
from .prepare import Material
from .results import Run, Score
from .windows import growing

TOKENS = 8192
"""Held-out tokens that are read at a time."""


def train(
    material: Material,
    position: str,
    seed: int,
    rate: float,
    on_step: Callable[[float], None],
    *,
    steps: int | None = None,
    warmup: int | None = None,
) -> tuple[EncoderWithLMHead, Fitted]:
    """Train a method with a seed and a learning rate.

    ``steps`` and ``warmup`` are those of the settings and a tenth of them by default.

    Raises:
        DivergedError: if the loss is not finite.
    """
    steps = material.settings.steps if steps is None else steps
    model = untrained(material.settings, position, material.vocab_size, seed).to(material.device)
    batches, what = growing(material.batches(seed), steps), f"the loss of {position!r}"
    return model, fit(model, batches, steps, rate, warmup=warmup, what=what, on_step=on_step)


def judging_steps(material: Material) -> int:
    """Return how many training steps take about as long as judging a model, which reads text in a third of the time."""
    tokens, settings = len(material.held_out.labels), material.settings
    of_a_length = max(1, tokens // (3 * settings.batch_size * settings.length))
    return of_a_length * len(settings.lengths)


def train_and_judge(material: Material, position: str, seed: int, rate: float, folder: Path, progress: Progress) -> Run:
    """Train a method with a seed and a learning rate, save the model in the run's folder, and judge it.

    Raises:
        DivergedError: if a loss is not finite.
    """

    def on_step(loss: float) -> None:
        progress.step(1, f"loss {loss:.2f}")

    settings, held_out = material.settings, material.held_out
    model, fitted = train(material, position, seed, rate, on_step)
    model.eval()

    def score(length: int) -> HeldOutScore:
        progress.step(0, "judging")
        found = lm_score(model, held_out.windows(length, TOKENS))
        check_finite(f"the loss of {position!r}", found.loss, settings.steps, rate)
        return found

    scores = at_lengths(settings.lengths, score)
    trained = scores[settings.length]
    assert isinstance(trained, HeldOutScore)  # a method that can't read the training length fails in training
    keep_model(model, folder, settings, position, seed)
    progress.step(judging_steps(material))
    return Run(
        learning_rate=rate,
        seconds=fitted.seconds,
        train_loss=[round(loss, 4) for loss in fitted.losses],
        scores={
            length: found if isinstance(found, Cannot) else Score(found.loss, found.accuracy)
            for length, found in scores.items()
        },
        # Losses by window, to tell a real difference between two methods from chance in the held-out text.
        window_losses=[round(float(part.mean()), 4) for part in trained.losses.split(64)],
        positional_parameters=sum(parameter.numel() for parameter in model.encoder.position.parameters()),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        curves=head_curves(model.encoder, settings.length - 1),
        attention=attention_by_offset(model, held_out, settings.length),
    )


@torch.no_grad()
def attention_by_offset(model: EncoderWithLMHead, held_out: HeldOut, length: int) -> list[list[list[float]] | None]:
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
