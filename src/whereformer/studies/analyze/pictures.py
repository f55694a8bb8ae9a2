"""Draw the Matplotlib figures of an analysis: all are saved as files, and two also appear in the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
from markupsafe import Markup
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ...analysis.findings import HeadFindings, ModelFindings, TableFindings
from ...lab.report import figures
from ...lab.report.heatmaps import PALETTES, averaged, limits
from ...lab.report.numbers import decimals, signed
from ...lab.report.panels import SMALL, Range

Floats = NDArray[np.float64]
Paint = Callable[[Figure], None]
Point = tuple[str, float, float]
"""A model's name, Toeplitzness and score."""

SIZE = 420, 300
PIXELS = 256
"""The most pixels of a matrix's side in a file."""
LEAST = 1.0
"""The smallest range of scores of a small panel."""
PANEL, GAP, LEFT, HEAD = 92, 12, 24, 30
"""Width of a head's panel, the gap between two, and the room for layer names and for the text above a panel."""


def drawn(models: Sequence[ModelFindings], score: str) -> dict[str, bytes]:
    """Return all figures as PNG and SVG, by the names of their files; ``score`` is the name of the models' scores."""
    files: dict[str, bytes] = {}
    for model, name in zip(models, _file_names(models), strict=True):
        if model.table is not None:
            files |= figures.printed(f"{name}-embeddings", 720, 290, embeddings(model.table))
        if model.heads:
            files |= figures.printed(f"{name}-heads", *head_panels(model.heads))
    points, measure = scatter_points(models)
    if len(points) > 1:
        files |= figures.printed("toeplitzness-over-score", *SIZE, scatter(points, measure, score))
    lines = step_lines(models)
    if lines:
        files |= figures.printed("toeplitzness-over-steps", *SIZE, over_steps(lines))
    return files


def _file_names(models: Sequence[ModelFindings]) -> list[str]:
    names = [re.sub(r"[^A-Za-z0-9.]+", "-", model.name).strip("-.") or "model" for model in models]
    return [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)]


def embeddings(table: TableFindings) -> Paint:
    """Draw P, its best Toeplitz part and what is left."""
    gram, part = averaged(table.gram, PIXELS), averaged(table.part, PIXELS)
    rest, ends, length = gram - part, limits(gram), len(table.gram)

    titles = ("$P = E E^T$", f"its best Toeplitz part: {decimals(table.toeplitzness)}", "what is left")

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, 3)
        for axes, title, values, center in zip(panels, titles, (gram, part, rest), (None, None, 0.0), strict=True):
            low, high = ends if center is None else limits(values, center)
            image = axes.imshow(
                values,
                cmap=PALETTES["sequential" if center is None else "diverging"],
                vmin=low,
                vmax=high,
                interpolation="nearest",
                extent=(-0.5, length - 0.5, length - 0.5, -0.5),
            )
            axes.set_title(title, size=10)
            axes.set(xticks=_ends(length), yticks=_ends(length))
            axes.spines[:].set_visible(False)
            axes.grid(visible=False)
            bar = figure.colorbar(image, ax=axes, location="bottom", aspect=30)
            bar.outline.set_visible(False)

    return paint


def _ends(length: int) -> list[int]:
    return sorted({0, (length - 1) // 2, length - 1})


def curve_of(head: HeadFindings) -> Floats:
    """Return a head's curve. If it was measured from scores, their mean is subtracted, since it has no effect."""
    curve = np.asarray(head.curve.detach().double().cpu().numpy())
    if head.scores is None:
        return curve
    return np.asarray(curve - float(head.scores.double().mean()))


def height_of(curve: Floats) -> Range:
    """Return the range of a head's small panel, at least one unit: smaller differences hardly matter and look flat."""
    return Range.of(curve).at_least(LEAST)


def head_panels(found: Sequence[HeadFindings]) -> tuple[int, int, Paint]:
    """Lay out all heads, one row per layer, with their scores, if any, and their curves near 0.

    Returns:
        width and height in points, and the function that draws.
    """
    layers = sorted({head.layer for head in found})
    mapped = any(head.scores is not None for head in found)
    tall = HEAD + (PANEL if mapped else 0) + PANEL // 2 + GAP
    columns = 1 + max(head.head for head in found)

    def paint(figure: Figure) -> None:
        axes = figures.canvas(figure)
        muted, line = rcParams["axes.labelcolor"], rcParams["grid.color"]
        for head in found:
            left, top = LEFT + head.head * (PANEL + GAP), layers.index(head.layer) * tall + HEAD
            axes.text(left, top - 15, f"head {head.head}: {decimals(head.toeplitzness, 2)}", size=8)
            axes.text(left, top - 5, head.name, size=7, color=muted)
            if head.scores is not None:
                center = float(head.scores.double().median())
                values = averaged(head.scores, PANEL)
                low, high = limits(values, center)
                axes.imshow(
                    values,
                    cmap=PALETTES["diverging"],
                    vmin=low,
                    vmax=high,
                    interpolation="nearest",
                    extent=(left, left + PANEL, top + PANEL, top),
                )
            heights = height_of(curve_of(head))
            ground = top + (PANEL if mapped else 0) + PANEL // 2
            curve, middle = curve_of(head), int(np.abs(head.offsets.cpu().numpy()).argmin())
            reach = min(SMALL, middle, len(curve) - 1 - middle)
            near = curve[middle - reach : middle + reach + 1]
            across = np.linspace(left, left + PANEL, len(near)) if reach else np.array([left + PANEL / 2])

            def down(value: Floats | float, ground: int = ground, heights: Range = heights) -> Floats:
                return np.asarray(ground - (PANEL / 2 - 6) * (value - heights.low) / heights.span)

            axes.plot([left, left + PANEL], [down(0.0)] * 2, color=line, linewidth=0.6)
            axes.plot([left + PANEL / 2] * 2, [ground, ground - PANEL / 2 + 6], color=line, linewidth=0.6)
            axes.plot(across, down(near), color="C0", linewidth=1.2, marker="" if reach else "o", markersize=3)
        for row, layer in enumerate(layers):
            axes.text(10, row * tall + HEAD + (tall - HEAD) / 2, f"layer {layer}", rotation=90, va="center", size=8)
        width, height = figure.get_size_inches() * 72
        reach = min(SMALL, len(found[0].offsets) // 2)
        note = f"curves: offsets {signed(-reach)} to {signed(reach)}, each head with its own heights"
        axes.text(LEFT, height - 6, note, size=7, color=muted)
        # imshow changes the limits.
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="auto")

    return LEFT + columns * (PANEL + GAP), len(layers) * tall + 2 * GAP, paint


def mean_of_heads(model: ModelFindings) -> float | None:
    """Return the mean Toeplitzness of a model's heads; None if it has none."""
    return fmean(head.toeplitzness for head in model.heads) if model.heads else None


def scatter_points(models: Sequence[ModelFindings]) -> tuple[list[Point], str]:
    """Return the models that have a score as points, and the name of the measure of Toeplitzness.

    It is the Toeplitzness of P if at least two models have a P, else that of heads. P is preferred because the heads of
    relative methods are Toeplitz by design, which says nothing about a score.
    """
    scored = [(model, model.score) for model in models if model.score is not None]
    tables = [(m.name, m.table.toeplitzness, score) for m, score in scored if m.table is not None]
    if len(tables) > 1:
        return tables, "Toeplitzness of P"
    points = [(model.name, mean_of_heads(model), score) for model, score in scored]
    return [(name, mean, score) for name, mean, score in points if mean is not None], "mean Toeplitzness of heads"


def scatter_drawing(points: Sequence[Point], measure: str, score: str) -> Markup | None:
    """Draw the scatter plot for the page; None for fewer than two points."""
    label = f"{measure} and {score} of each model; the numbers are in the table"
    return figures.draw("scatter", label, *SIZE, scatter(points, measure, score)) if len(points) > 1 else None


def scatter(points: Sequence[Point], measure: str, score: str) -> Paint:
    """Plot models as labeled points."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=measure, ylabel=score)
        _, across, up = zip(*points, strict=True)
        axes.scatter(across, up, color="C0", s=28, zorder=3)
        axes.margins(0.12)
        _label(figure, axes, points)

    return paint


def _label(figure: Figure, axes: Axes, points: Sequence[Point]) -> None:
    """Put names next to their points so that they cover no other name or point, if possible."""
    figure.draw_without_rendering()
    inside = axes.get_window_extent()
    places = axes.transData.transform([point[1:] for point in points])
    taken: list[tuple[float, ...]] = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for name, x, y in points:
        best = None
        for right, above in ((8, 0), (-8, 0), (0, 10), (0, -10), (7, 8), (-7, 8), (7, -8), (-7, -8), (0, 20), (0, -20)):
            text = axes.annotate(
                name,
                (x, y),
                (right, above),
                textcoords="offset points",
                ha="left" if right > 0 else "right" if right < 0 else "center",
                va="bottom" if above > 0 else "top" if above < 0 else "center",
                size=9,
            )
            box = text.get_window_extent()
            cost = sum(_overlap(box.extents, other) for other in taken)
            cost += box.width * box.height - _overlap(box.extents, inside.extents)
            if best is None or cost < best[0] - 1:
                if best is not None:
                    best[1].remove()
                best = (cost, text)
            else:
                text.remove()
            if cost < 1:
                break
        if best is not None:
            taken.append(tuple(best[1].get_window_extent().extents))


def _overlap(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the area that two boxes (left, bottom, right, top) share."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(0.0, width) * max(0.0, height)


def step_lines(models: Sequence[ModelFindings]) -> dict[str, list[tuple[int, float]]]:
    """Return the Toeplitzness of P and of heads over training steps, for each that at least two checkpoints have."""
    stepped = [(model.step, model) for model in models if model.step is not None]
    of_heads = [(step, mean_of_heads(model)) for step, model in stepped]
    lines = {
        "P": [(step, model.table.toeplitzness) for step, model in stepped if model.table is not None],
        "heads, mean": [(step, mean) for step, mean in of_heads if mean is not None],
    }
    return {name: sorted(points) for name, points in lines.items() if len(points) > 1}


def steps_drawing(models: Sequence[ModelFindings]) -> Markup | None:
    """Draw Toeplitzness over training for the page; None for fewer than two checkpoints."""
    lines = step_lines(models)
    label = "Toeplitzness over training steps; the numbers are in the table"
    return figures.draw("steps", label, *SIZE, over_steps(lines)) if lines else None


def over_steps(lines: dict[str, list[tuple[int, float]]]) -> Paint:
    """Plot Toeplitzness over training steps."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="training step", ylabel="Toeplitzness")
        for number, (name, points) in enumerate(lines.items()):
            axes.plot(*zip(*points, strict=True), color=f"C{number}", marker="os"[number], markersize=4.5, label=name)
        axes.set_ylim(0, 1.03)
        if len(lines) > 1:
            axes.legend(frameon=False, loc="best")

    return paint
