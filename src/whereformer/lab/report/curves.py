"""A figure of what each head of a model adds to scores at each offset."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from .figures import series
from .report import Figure

MOST_ACROSS = 4
"""The most plots side by side."""
CAPTION = (
    "A line for each head. Tokens before the one that looks are on the left, tokens after it on the right. Where a "
    "line is higher, its head looks more; only differences within a head matter."
)


def figure(title: str, layers: Sequence[Sequence[Sequence[float]]], *, folded: bool = False) -> Figure:
    """Return a figure with a plot for each layer, or one plot if all layers are equal.

    Args:
        title: its title.
        layers: a number for each layer, head and offset; offset 0 is in the middle.
        folded: whether a click opens it.
    """
    same = len(layers) > 1 and all(layer == layers[0] for layer in layers)
    shown = {"all layers": layers[0]} if same else {f"layer {number}": layer for number, layer in enumerate(layers)}
    reach = len(layers[0][0]) // 2
    across = min(MOST_ACROSS, len(shown))
    down = math.ceil(len(shown) / across)

    def paint(canvas: Canvas) -> None:
        plots = list(canvas.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
        for axes, (name, heads) in zip(plots, shown.items(), strict=False):
            for look, head in zip(series(len(heads)), heads, strict=True):
                axes.plot(range(-reach, reach + 1), head, **look.line)
            axes.set_title(name, fontsize=10)
        for axes in plots[len(shown) :]:
            axes.set_axis_off()

    return Figure(title, paint, CAPTION, (680, 60 + 140 * down), folded)
