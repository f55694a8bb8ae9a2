"""The figures of an analysis: all are saved as files, and those about several models also appear in the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure
from torch import Tensor

from ...analysis.findings import HeadFindings, ModelFindings, TableFindings
from ...lab.report import figures
from ...lab.report.heatmaps import PALETTES, averaged, limits
from ...lab.report.numbers import decimals, signed
from ...lab.report.panels import SMALL, Range

Paint = Callable[[Figure], None]
Point = tuple[str, float, float]
"""A model's name, Toeplitzness and score."""

SIZE = 420, 300
PIXELS = 256
"""The most pixels of a matrix's side in a file."""
LEAST = 1.0
"""The smallest range of scores of a small panel."""
PANEL = 92
"""Width of a head's panel in a file, in points."""


class Overview(NamedTuple):
    """A figure about several models: its file's name, its caption with a note, and what draws it."""

    name: str
    title: str
    note: str
    paint: Paint


def drawn(models: Sequence[ModelFindings]) -> dict[str, bytes]:
    """Return all figures as PNG and SVG, by the names of their files."""
    files: dict[str, bytes] = {}
    names = [re.sub(r"[^A-Za-z0-9.]+", "-", model.name).strip("-.") or "model" for model in models]
    for number, (model, name) in enumerate(zip(models, names, strict=True)):
        stem = name if names.count(name) == 1 else f"{name}-{number}"
        if model.table is not None:
            files |= figures.printed(f"{stem}-embeddings", 720, 290, embeddings(model.table))
        if model.heads:
            files |= figures.printed(f"{stem}-heads", *head_panels(model))
    for each in overviews(models):
        files |= figures.printed(each.name, *SIZE, each.paint)
    return files


def embeddings(table: TableFindings) -> Paint:
    """Draw P, its best Toeplitz part and what is left."""
    gram, part = averaged(table.gram, PIXELS), averaged(table.part, PIXELS)
    last, ends = len(table.gram) - 1, limits(gram)
    maps = (
        ("$P = E E^T$", gram, ends, "sequential"),
        (f"its best Toeplitz part: {table.toeplitzness:.3f}", part, ends, "sequential"),
        ("what is left", gram - part, limits(gram - part, 0.0), "diverging"),
    )

    def paint(figure: Figure) -> None:
        for axes, (title, values, (low, high), palette) in zip(figure.subplots(1, 3), maps, strict=True):
            extent = (-0.5, last + 0.5, last + 0.5, -0.5)
            image = axes.imshow(
                values, cmap=PALETTES[palette], vmin=low, vmax=high, interpolation="nearest", extent=extent
            )
            axes.set_title(title, size=10)
            axes.set(xticks=sorted({0, last // 2, last}), yticks=sorted({0, last // 2, last}))
            axes.spines[:].set_visible(False)
            axes.grid(visible=False)
            figure.colorbar(image, ax=axes, location="bottom", aspect=30).outline.set_visible(False)

    return paint


def curve_of(head: HeadFindings) -> Tensor:
    """Return a head's curve. If it was measured from scores, their mean is subtracted, since it has no effect."""
    return head.curve if head.scores is None else head.curve - head.scores.double().mean()


def height_of(curve: Tensor) -> Range:
    """Return the range of a head's small panel, at least one unit: smaller differences hardly matter and look flat."""
    return Range.of(curve.numpy()).at_least(LEAST)


def head_panels(model: ModelFindings) -> tuple[int, int, Paint]:
    """Lay out all heads, one row per layer, with their scores, if any, and their curves near 0.

    Returns:
        width and height in points, and the function that draws.
    """
    layers = model.by_layer
    columns = max(map(len, layers.values()))
    ratios = [2, 1] if any(head.scores is not None for head in model.heads) else [1]
    middle = len(model.heads[0].offsets) // 2
    reach = min(SMALL, middle)
    near = slice(middle - reach, middle + reach + 1)
    note = f"curves: offsets {signed(-reach)} to {signed(reach)}, each head with its own heights"
    width, height = columns * (PANEL + 12) + 40, len(layers) * (sum(ratios) * PANEL // 2 + 50) + 40

    def paint(figure: Figure) -> None:
        figure.set_layout_engine("none")
        figure.text(28 / width, 8 / height, note, size=7, color=rcParams["axes.labelcolor"])
        edges = {"left": 28 / width, "right": 1 - 8 / width, "bottom": 24 / height, "top": 1 - 32 / height}
        spaces = {"height_ratios": ratios * len(layers), "hspace": 0.35, "wspace": 0.12}
        grid = figure.subplots(len(layers) * len(ratios), columns, squeeze=False, gridspec_kw=edges | spaces)
        line = {"color": rcParams["grid.color"], "linewidth": 0.6}
        for axes in grid.flat:
            axes.set_axis_off()
        for row, (layer, heads) in enumerate(layers.items()):
            beside = grid[row * len(ratios), 0]
            beside.text(-0.12, 0.5, f"layer {layer}", size=8, rotation=90, va="center", transform=beside.transAxes)
            for head, places in zip(heads, grid[row * len(ratios) :].T, strict=False):
                above, below = places[0], places[len(ratios) - 1]
                above.set_title(f"head {head.head}: {head.toeplitzness:.2f}\n{head.name}", size=7, loc="left", pad=3)
                if head.scores is not None:
                    scores = averaged(head.scores, PANEL)
                    low, high = limits(scores, float(head.scores.double().median()))
                    look = {"cmap": PALETTES["diverging"], "vmin": low, "vmax": high, "interpolation": "nearest"}
                    above.imshow(scores, aspect="auto", **look)
                curve = curve_of(head)
                heights = height_of(curve)
                below.axhline(0, **line)
                below.axvline(0, **line)
                below.plot(head.offsets[near], curve[near], linewidth=1.2, marker="" if middle else "o", clip_on=False)
                below.set_ylim(heights.low, heights.high)

    return width, height, paint


def scatter_points(models: Sequence[ModelFindings]) -> tuple[list[Point], str]:
    """Return the models that have a score as points, and the name of the measure of Toeplitzness.

    It is the Toeplitzness of P if at least two models have a P, else that of heads. P is preferred because the heads of
    relative methods are Toeplitz by design, which says nothing about a score.
    """
    scored = [(model, model.score) for model in models if model.score is not None]
    tables = [(m.name, m.table.toeplitzness, score) for m, score in scored if m.table is not None]
    if len(tables) > 1:
        return tables, "Toeplitzness of P"
    points = [(model.name, model.mean_of_heads, score) for model, score in scored]
    return [(name, mean, score) for name, mean, score in points if mean is not None], "mean Toeplitzness of heads"


def overviews(models: Sequence[ModelFindings]) -> list[Overview]:
    """Return the figures of Toeplitzness over training and over scores, if there are at least two points to show."""
    stepped = sorted([(model.step, model) for model in models if model.step is not None], key=lambda each: each[0])
    lines = {
        "P": [(step, model.table.toeplitzness) for step, model in stepped if model.table is not None],
        "heads, mean": [(step, mean) for step, model in stepped if (mean := model.mean_of_heads) is not None],
    }
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    points, measure = scatter_points(models)

    def over_steps(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="training step", ylabel="Toeplitzness", ylim=(0, 1.03))
        for (name, points), marker in zip(lines.items(), "os", strict=False):
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4.5, label=name)
        if len(lines) > 1:
            axes.legend(frameon=False, loc="best")

    def over_scores(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=measure, ylabel="score")
        axes.margins(0.12)
        center = np.median([x for _, x, _ in points])
        for name, x, y in points:
            axes.plot(x, y, "o", color="C0", markersize=5.5)
            side, away = ("left", 8) if x <= center else ("right", -8)
            axes.annotate(name, (x, y), (away, 0), textcoords="offset points", ha=side, va="center", size=9)

    found = []
    if lines:
        note = "At 1, only the distance between two positions counts"
        found.append(Overview("toeplitzness-over-steps", "Toeplitzness over training", note, over_steps))
    if len(points) > 1:
        note = f"Each point is a model{correlation(points)}"
        found.append(Overview("toeplitzness-over-score", "Toeplitzness and score", note, over_scores))
    return found


def correlation(points: Sequence[Point]) -> str:
    """Return Pearson's correlation and the number of points as text; "" for fewer than three points."""
    _, first, second = zip(*points, strict=True)
    if len(points) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return ""
    return f"; correlation {decimals(float(np.corrcoef(first, second)[0, 1]), 2)} over {len(points)} models"
