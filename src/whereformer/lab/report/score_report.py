"""Losses and other scores in reports: in words, as a table, and as curves over steps or over the length of the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Canvas

from ..sheet import Sheet
from . import figures
from .report import Figure

Paint = Callable[[Canvas], None]
Curve = Sequence[Sequence[float]]
"""Steps, each with a loss."""
MAX_POINTS = 200
"""About the largest number of points of a curve."""


def smooth(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Return steps, each with the mean loss of the twenty-fifth of the training that ends there."""
    window, stride = max(1, len(losses) // 25), max(1, len(losses) // MAX_POINTS)
    ends = range(len(losses), window - 1, -stride)[::-1]
    return [(end, fmean(losses[end - window : end])) for end in ends]


def format_scores(scores: Mapping[str, float]) -> str:
    """Format scores for people to read."""
    return ", ".join(f"{name.replace('_', ' ')} {format_score(name, score)}" for name, score in scores.items())


def format_score(name: str, score: float) -> str:
    """Format a score: accuracy and recall in percent."""
    return f"{score:.1%}" if name.endswith(("accuracy", "recall")) else f"{score:.3f}"


def build_sections(
    losses: Sequence[Any], scores: Sequence[Any], last: Mapping[str, Mapping[str, float]] | None = None
) -> list[Sheet | Figure]:
    """Return a table of all scores, and a figure with the losses in training and on held-out text.

    Args:
        losses: steps with their training losses.
        scores: steps with their held-out scores by name, "loss" among them.
        last: scores for more rows of the table, by the names of these rows.
    """
    names = [name.replace("_", " ") for name in scores[-1][1]]
    labeled = [(f"{step:,}", by_name) for step, by_name in scores] + [*(last or {}).items()]
    rows = [[label, *map(format_score, by_name, by_name.values())] for label, by_name in labeled]
    held_out = [(step, by_name["loss"]) for step, by_name in scores]
    paint = paint_over_steps({"training": losses, "held-out": held_out})
    caption = "The training loss is a moving average."
    return [Sheet.of("Held-out scores", ["step", *names], rows), Figure("Loss over steps", paint, caption)]


def paint_over_steps(curves: Mapping[str, Curve], guessing: float | None = None) -> Paint:
    """Return a function that paints losses over steps, and the loss of guessing by token frequency as a line."""

    def paint(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="training step", ylabel="loss")
        for name, curve in curves.items():
            axes.plot(*zip(*curve, strict=True), label=name, marker="o" if len(curve) == 1 else "")
        if guessing is not None:
            axes.axhline(guessing, color=figures.MUTED, linewidth=1, linestyle=(0, (1, 2)), label="guessing")
        if len(axes.lines) > 1:
            figures.legend(canvas)
        # The loss falls so far in the first steps that they would press the rest flat.
        start = max(curve[-1][0] for curve in curves.values()) / 10
        visible = [] if guessing is None else [guessing]
        visible += [loss for curve in curves.values() for step, loss in curve if step > start]
        margin = 0.1 * (max(visible) - min(visible)) or 0.1
        axes.set(ylim=(min(visible) - margin, max(visible) + margin), xlim=(0, None))

    return paint


def paint_over_length(losses: Mapping[str, Mapping[int, tuple[float, float, float]]]) -> Paint:
    """Return a function that paints the held-out loss of each method at each length.

    Losses are the (lowest, median, highest) over seeds; lengths may be missing.
    """
    gap = min(0.05, 0.5 / len(losses))
    lengths = sorted({length for values in losses.values() for length in values})

    def paint(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        for index, (name, values) in enumerate(losses.items()):
            # Side by side, so that equal losses don't hide each other.
            x = [lengths.index(length) + gap * (index - (len(losses) - 1) / 2) for length in values]
            low, median, high = zip(*values.values(), strict=True)
            (line,) = axes.plot(x, median, label=name, marker="os^DvPX*"[index % 8], markersize=5)
            if high != low:
                axes.vlines(x, low, high, color=line.get_color(), linewidth=1.2)
        figures.legend(canvas)
        trained, *longer = lengths
        times = [f"{length}\n{length // trained}\N{MULTIPLICATION SIGN}" for length in longer]
        axes.set_xticks(range(len(lengths)), [f"{trained}\ntrained", *times])
        axes.grid(axis="x", visible=False)
        axes.margins(x=0.12)
        axes.set(xlabel="tokens read at a time", ylabel="held-out loss")

    return paint
