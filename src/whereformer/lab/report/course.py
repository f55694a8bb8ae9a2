"""The course of a training in a report: the held-out scores as a table, and the losses as curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Canvas

from ..sheet import Sheet
from .figures import series
from .report import Figure

POINTS = 200
"""The most points of a curve."""


def means(losses: Sequence[float]) -> list[Any]:
    """Return means of the losses of a few steps each, with the last of these steps."""
    window = math.ceil(len(losses) / POINTS)
    return [[end, fmean(losses[end - window : end])] for end in range(window, len(losses) + 1, window)]


def in_words(scores: Mapping[str, float]) -> str:
    """Return scores for people to read."""
    return ", ".join(f"{name.replace('_', ' ')} {number(name, score)}" for name, score in scores.items())


def number(name: str, score: float) -> str:
    """Format a score: accuracy and recall in percent."""
    return f"{score:.1%}" if name.endswith(("accuracy", "recall")) else f"{score:.3f}"


def course(
    losses: Sequence[Any], scores: Sequence[Any], last: Mapping[str, Mapping[str, float]] | None = None
) -> list[Sheet | Figure]:
    """Return a table of all scores, and a figure with the losses in training and on held-out text.

    Args:
        losses: steps with their training losses, see :func:`means`.
        scores: steps with their held-out scores by name, "loss" among them.
        last: scores for more rows of the table, by the names of these rows.
    """
    names = [name.replace("_", " ") for name in scores[-1][1]]
    named = [(f"{step:,}", each) for step, each in scores] + [*(last or {}).items()]
    rows = [[name, *map(number, each, each.values())] for name, each in named]
    curves = {"training": losses, "held-out": [[step, each["loss"]] for step, each in scores]}

    def paint(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        for look, (name, points) in zip(series(len(curves)), curves.items(), strict=True):
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) == 1 else "", **look.line)
        # The first steps would press the rest flat.
        after = [loss for step, loss in chain(*curves.values()) if step > losses[-1][0] / 10]
        room = 0.1 * (max(after) - min(after)) or 0.1
        axes.set(xlabel="training step", ylabel="loss", ylim=(min(after) - room, max(after) + room))
        axes.legend()

    caption = "The training loss is a mean over a few steps."
    return [Sheet.of("Held-out scores", ["step", *names], rows), Figure("Loss over steps", paint, caption)]
