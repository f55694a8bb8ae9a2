"""Grids of attention heads: for each layer and head a small plot over the offset, which opens large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from . import figures, panels
from .numbers import percent, signed
from .panels import Curve, Panel, Range, Row

Heads = Sequence[Sequence[Sequence[float]]]
"""A number for each layer, head and offset; offset 0 is in the middle."""

EVEN = 1.5
"""A head counts as even over all distances if its highest share is below this multiple of its mean share."""


def attention_shares(
    layers: Sequence[Sequence[Sequence[float]] | None],
    look: figures.Series,
    name: str,
    label: str,
    explained: Sequence[Sequence[float]] | None = None,
) -> Markup:
    """Draw the mean share of attention that each head gives to each offset, and name the highest in each panel.

    Heights are square roots of the shares; otherwise heads that look at one place would press all others flat.

    Args:
        layers: shares for each layer, head and offset; None for layers of pooled sequences, which are left out.
        look: the color of the curves.
        name: a name that is unique on the page; ids begin with it.
        label: what the grid shows.
        explained: (layers, heads), the share of attention that the offset explains, if measured; also shown.
    """
    shown = {f"layer {number}": heads for number, heads in enumerate(layers) if heads is not None}
    values = [value for heads in shown.values() for head in heads for value in head]
    # An even head should look even.
    highest = max(*values, 5 * sum(values) / len(values))
    shared = Range(0.0, highest**0.5)

    def draw(head: Sequence[float], label: str) -> Curve:
        return panels.draw(_offsets(head), np.sqrt(head), shared, label=label, ticks=_shares(max(head)))

    offsets = near(max(len(heads[0]) for heads in shown.values()))
    note = f"small: {offsets}; heights 0 to {highest:.0%}"
    details: list[list[tuple[str, ...]]] = [[(_peak(head),) for head in heads] for heads in shown.values()]
    if explained is not None:
        shares = [layer for layer, heads in zip(explained, layers, strict=True) if heads is not None]
        details = [
            [(*peak, f"{percent(share)} by offset") for peak, share in zip(*pair, strict=True)]
            for pair in zip(details, shares, strict=True)
        ]
    return _grid(shown, look, name, label, draw, note, "mean share of attention", details)


def near(offsets: int) -> str:
    """Describe which of a curve's offsets the small panels show."""
    reach = min(panels.SMALL, offsets // 2)
    return f"offsets {signed(-reach)} to {signed(reach)}"


def _offsets(head: Sequence[float]) -> range:
    center = len(head) // 2
    return range(-center, len(head) - center)


def _peak(head: Sequence[float]) -> str:
    highest = max(head)
    if highest < EVEN * sum(head) / len(head):
        return "even"
    return f"{signed(head.index(highest) - len(head) // 2)}: {highest:.0%}"


def _shares(highest: float) -> dict[float, str]:
    """Return ticks at the square roots of round shares, far enough apart to be read."""
    ticks: dict[float, str] = {}
    for mark in (100, 80, 60, 40, 20, 10, 5, 2, 1, 0.5, 0.2, 0.1, 0):
        height = (mark / 100) ** 0.5
        if mark / 100 <= highest and (not ticks or min(ticks) - height > 0.15 * highest**0.5):
            ticks[height] = f"{mark:g}%"
    return ticks


def _grid(
    layers: Mapping[str, Sequence[Sequence[float]]],
    look: figures.Series,
    name: str,
    label: str,
    draw: Callable[[Sequence[float], str], Curve],
    note: str,
    unit: str,
    details: Sequence[Sequence[tuple[str, ...]]] | None = None,
) -> Markup:
    """Arrange layers from top to bottom and heads from left to right. The note appears once, at the first layer."""
    rows: list[Row] = []
    for place, heads in layers.items():
        texts = details[len(rows)] if details else [()] * len(heads)
        drawn = [
            Panel(place, f"head {index}", look, "", said, draw(head, f"{label}: {place}, head {index}"), unit)
            for index, (head, said) in enumerate(zip(heads, texts, strict=True))
        ]
        rows.append(Row(place, "" if rows else note, tuple(drawn)))
    return panels.grid(rows, name, label)
