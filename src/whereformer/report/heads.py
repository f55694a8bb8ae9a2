"""What attention heads do with distance: a small panel per layer and head, over the offset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import figures

Heads = Sequence[Sequence[Sequence[float]]]
"""A number per layer, head and offset; offsets lie evenly around 0."""

PANEL, ROW = (82, 44), 62
"""Width and height of a panel, and of a row with what is written above it."""
LEFT, TOP, BOTTOM, GAP = 52, 12, 36, 8
EVEN = 1.5
"""A head looks evenly at all distances if its highest share is below so many times its mean share."""


def offset_curves(heads: Heads, look: figures.Series, name: str, label: str, reach: int = 32) -> Markup:
    """What each head adds to scores at offsets -reach .. reach, on one scale; equal layers are drawn once."""
    shown = [[_middle(head, reach) for head in layer] for layer in heads]
    shared = len(shown) > 1 and all(layer == shown[0] for layer in shown)
    if shared:
        shown = shown[:1]
    values = [value for layer in shown for head in layer for value in head]
    low, high = min(0.0, *values), max(0.0, *values)
    span = (high - low) or 1.0
    ticks = MaxNLocator(2, steps=[1, 2, 5, 10]).tick_values(low, high)
    return _grid(
        shown,
        look,
        name,
        label,
        place=lambda value: (value - low) / span,
        ticks={_signed(tick): float(tick) for tick in ticks if low <= tick <= high},
        rows=["all layers"] if shared else [f"layer {layer}" for layer in range(len(shown))],
    )


def attention_shares(
    layers: Sequence[Sequence[Sequence[float]] | None], look: figures.Series, name: str, label: str
) -> Markup:
    """The mean share of attention that each head gives to each offset; above each panel the highest one.

    Layers without one, those of pooled sequences, are left out.
    Heights are the shares' square roots: heads that look at one place would press the others flat.
    """
    shown = {number: heads for number, heads in enumerate(layers) if heads is not None}
    values = [value for heads in shown.values() for head in heads for value in head]
    # An even head shall look even.
    highest = max(*values, 5 * sum(values) / len(values))
    percent = max(tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if tick <= 100 * highest)
    return _grid(
        list(shown.values()),
        look,
        name,
        label,
        place=lambda value: (value / highest) ** 0.5,
        ticks={"0": 0.0, f"{percent / 5:g}%": percent / 500, f"{percent:g}%": percent / 100},
        rows=[f"layer {number}" for number in shown],
        above=_peak,
    )


def _middle(head: Sequence[float], reach: int) -> Sequence[float]:
    centre = len(head) // 2
    reach = min(reach, centre)
    return head[centre - reach : centre + reach + 1]


def _peak(head: Sequence[float]) -> str:
    highest = max(head)
    if highest < EVEN * sum(head) / len(head):
        return "even"
    return f"{_signed(head.index(highest) - len(head) // 2)}: {highest:.0%}"


def _signed(number: float) -> str:
    return f"{number:+g}".replace("-", "\N{MINUS SIGN}") if number else "0"


def _grid(
    heads: Heads,
    look: figures.Series,
    name: str,
    label: str,
    *,
    place: Callable[[float], float],
    ticks: dict[str, float],
    rows: Sequence[str],
    above: Callable[[Sequence[float]], str] = lambda head: "",
) -> Markup:
    """Panels of layers (downwards) and heads (to the right).

    Args:
        heads: the values.
        look: their colour.
        name, label: as in :func:`figures.draw`.
        place: the height of a value in a panel, 0 to 1.
        ticks: values to mark at the left side, and how they are written.
        rows: names of the layers.
        above: what to write above a head's panel.
    """
    width = LEFT + max(len(layer) for layer in heads) * (PANEL[0] + GAP)
    height = TOP + len(heads) * ROW + BOTTOM

    def paint(figure: Figure) -> None:
        axes = figures.canvas(figure)
        small: dict[str, Any] = {"size": 8, "color": figures.MUTED}
        for layer, row in enumerate(heads):
            ground = TOP + (layer + 1) * ROW

            def down(value: float, ground: int = ground) -> float:
                return ground - PANEL[1] * place(value)

            axes.text(8, ground - PANEL[1] / 2, rows[layer], rotation=90, ha="center", va="center", size=9)
            for text, tick in ticks.items():
                axes.text(LEFT - 5, down(tick), text, ha="right", va="center", **small)
            for index, head in enumerate(row):
                left = LEFT + index * (PANEL[0] + GAP)
                right, middle, reach = left + PANEL[0], left + PANEL[0] / 2, len(head) // 2
                if layer == 0:
                    axes.text(left, 10, f"head {index}", size=9)
                axes.text(right, ground - PANEL[1] - 4, above(head), ha="right", **small)
                axes.plot([left, right], [down(0)] * 2, color=figures.GRID, linewidth=0.8)
                axes.plot([middle] * 2, [ground, ground - PANEL[1]], color=figures.GRID, linewidth=0.8)
                across = [left + PANEL[0] * offset / (len(head) - 1) for offset in range(len(head))]
                heights = [down(value) for value in head]
                axes.fill([left, *across, right], [down(0), *heights, down(0)], fc=look.colour, ec="none", alpha=0.25)
                axes.plot(across, heights, color=look.colour, linewidth=1.3)
                if layer == len(heads) - 1:
                    for at, offset, side in (left, -reach, "left"), (middle, 0, "center"), (right, reach, "right"):
                        axes.text(at, ground + 11, _signed(offset), ha=side, **small)
        axes.text(
            (LEFT + width) / 2,
            height - 6,
            "offset (tokens before \N{MINUS SIGN}, after +)",
            ha="center",
            size=9,
            color=figures.MUTED,
        )

    return figures.draw(name, label, width, height, paint)
