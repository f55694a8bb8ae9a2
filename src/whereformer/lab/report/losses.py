"""Plots of loss: over training steps, and over the length of the text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from . import figures
from .figures import Series

Paint = Callable[[Figure], None]
POINTS = 200


def smoothed(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return steps and losses to draw. Each loss is a mean over a window of a twenty-fifth of the training."""
    window = max(1, len(losses) // 25)
    stride = max(1, len(losses) // POINTS)
    ends = range(len(losses), window - 1, -stride)[::-1]
    return list(ends), [statistics.fmean(losses[end - window : end]) for end in ends]


def over_steps(losses: Mapping[str, Sequence[float]], looks: Mapping[str, Series], guessing: float) -> Paint:
    """Return what paints the training loss of each method over steps, and the loss of guessing by token frequency.

    Args:
        losses: the loss of each step, for each method.
        looks: the look of each method.
        guessing: the loss of guessing.
    """
    curves = {name: smoothed(values) for name, values in losses.items()}

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for name, (steps, values) in curves.items():
            axes.plot(steps, values, label=name, **looks[name].line)
        figure.legend(loc="outside right upper")
        lowest = min(guessing, *(min(values) for _, values in curves.values()))
        ends = [values[-1] for _, values in curves.values()]
        # The loss falls so far in the first steps that they would press the rest flat.
        highest = max(guessing, *(max(values[len(values) // 10 :]) for _, values in curves.values()))
        room = 0.05 * (highest - lowest) or 0.1
        axes.set(ylim=(lowest - 2 * room, highest + 2 * room), xlim=(0, None), xlabel="training step", ylabel="loss")
        below = min(ends) > guessing
        axes.axhline(guessing, color=figures.MUTED, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            "guessing by frequency",
            (1, guessing),
            (0, -4 if below else 4),
            axes.get_yaxis_transform(),
            "offset points",
            ha="right",
            va="top" if below else "bottom",
            color=figures.MUTED,
        )

    return paint


def over_length(losses: Mapping[str, Mapping[int, tuple[float, float, float]]], looks: Mapping[str, Series]) -> Paint:
    """Return what paints the held-out loss of each method at each length.

    Args:
        losses: for each method and length the (lowest, median, highest) loss over seeds; lengths may be missing.
        looks: the look of each method.
    """
    gap = min(0.05, 0.5 / len(losses))
    lengths = sorted({length for values in losses.values() for length in values})

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for number, (name, values) in enumerate(losses.items()):
            # Side by side, so that equal losses don't hide each other.
            places = [lengths.index(length) + gap * (number - (len(losses) - 1) / 2) for length in values]
            low, median, high = zip(*values.values(), strict=True)
            look = looks[name]
            axes.plot(places, median, label=name, marker=look.marker, markersize=5, **look.line)
            if high != low:
                axes.vlines(places, low, high, color=look.color, linewidth=1.2, gid=look.group)
        figure.legend(loc="outside right upper")
        trained, *longer = lengths
        times = [f"{length}\n{length // trained}\N{MULTIPLICATION SIGN}" for length in longer]
        axes.set_xticks(range(len(lengths)), [f"{trained}\ntrained", *times])
        axes.grid(axis="x", visible=False)
        axes.margins(x=0.12)
        axes.set(xlabel="tokens read at a time", ylabel="held-out loss")

    return paint
