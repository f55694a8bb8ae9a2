"""What attention heads do with distance: a small panel per layer and head, over the offset, that opens large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from . import figures, panels
from .numbers import percent, plain, signed
from .panels import Curve, Panel, Range, Row

Heads = Sequence[Sequence[Sequence[float]]]
"""A number per layer, head and offset; offsets lie evenly around 0."""

EVEN = 1.5
"""A head looks evenly at all distances if its highest share is below this multiple of its mean share."""


def offset_curves(heads: Heads, look: figures.Series, name: str, label: str) -> Markup:
    """What each head adds to scores, the small panels on one scale; equal layers are drawn once."""
    same = len(heads) > 1 and all(layer == heads[0] for layer in heads)
    shown = {"all layers": heads[0]} if same else {f"layer {number}": layer for number, layer in enumerate(heads)}
    shared = Range.of(*(head for layer in shown.values() for head in layer))

    def draw(head: Sequence[float], label: str) -> Curve:
        return panels.draw(_offsets(head), head, shared, label=label)

    low, high = (plain(float(f"{end:.2g}")) for end in (shared.low, shared.high))
    note = f"small: {near(len(heads[0][0]))}; heights {low} to {high}"
    return _grid(shown, look, name, label, draw, note, "added to scores")


def attention_shares(
    layers: Sequence[Sequence[Sequence[float]] | None],
    look: figures.Series,
    name: str,
    label: str,
    explained: Sequence[Sequence[float]] | None = None,
) -> Markup:
    """The mean share of attention that each head gives to each offset; in each panel the highest one.

    After it stands how much the offset explains, (layers, heads), where that was measured.
    Layers without one, those of pooled sequences, are left out.
    Heights are the shares' square roots: heads that look at one place would press the others flat.
    """
    shown = {f"layer {number}": heads for number, heads in enumerate(layers) if heads is not None}
    values = [value for heads in shown.values() for head in heads for value in head]
    # An even head shall look even.
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
    """What the small panels show of curves over a number of offsets."""
    reach = min(panels.SMALL, offsets // 2)
    return f"offsets {signed(-reach)} to {signed(reach)}"


def _offsets(head: Sequence[float]) -> range:
    centre = len(head) // 2
    return range(-centre, len(head) - centre)


def _peak(head: Sequence[float]) -> str:
    highest = max(head)
    if highest < EVEN * sum(head) / len(head):
        return "even"
    return f"{signed(head.index(highest) - len(head) // 2)}: {highest:.0%}"


def _shares(highest: float) -> dict[float, str]:
    """Square roots of round shares to mark, far enough apart to be read."""
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
    """Layers downwards, heads to the right; the note stands once, at the first layer."""
    rows: list[Row] = []
    for place, heads in layers.items():
        texts = details[len(rows)] if details else [()] * len(heads)
        drawn = [
            Panel(place, f"head {index}", look, "", said, draw(head, f"{label}: {place}, head {index}"), unit)
            for index, (head, said) in enumerate(zip(heads, texts, strict=True))
        ]
        rows.append(Row(place, "" if rows else note, tuple(drawn)))
    return panels.grid(rows, name, label)
