"""The report of an analysis: tables and figures of what models learned about position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import correlation
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps, rcParams
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ..analysis import verdicts
from ..analysis.findings import BLIND, NEAR, POSITION_BLIND, HeadFindings, ModelFindings, TableFindings
from ..errors import join_words
from ..lab.report.report import Figure, Report
from ..lab.sheet import DASH, Cell, Column, Sheet, decimals, plain

BLUE_TO_ORANGE = LinearSegmentedColormap.from_list(
    "blue to orange", ("#00294a", "#0072b2", "#7fbfe3", "#f7f7f7", "#f2b077", "#d55e00", "#5c2400")
)
"""For values on both sides of a middle. Color-blind people can read it, and cividis for small to large."""
OUTLIERS = 0.5
"""Percentage of pixels at each end of a scale that take the end's color, so that they do not stretch the scale."""
MAX_PIXELS = 256
"""The largest number of pixels on a side of the picture of P."""
METHOD = (
    "P is E E^T of the position embeddings as they are stored, before any norm or projection.",
    "A score by position is the mean over pairs of words drawn independently from the vocabulary. It includes "
    "everything that the model does: norms, projections, biases and the division by the root of the head's width.",
    "If positions are embedded, the mean over all pairs is subtracted in the first layer, which softmax ignores.",
    "In deeper layers, every token is the mean state that the layer reads from random words. The score of two such "
    "tokens without position is subtracted, so what is left is the method's effect in that layer.",
    "Fits include a constant, which softmax ignores. Each offset counts as often as it occurs.",
)
MAX_OPEN_HEADS = 24
"""Beyond this number of heads, their table is folded."""
MIN_RANGE = 1.0
"""The smallest range of scores of a panel: smaller differences hardly matter, and look flat."""
SHOWN_OFFSETS = 32
"""Offsets on each side that a curve near 0 shows."""
PANEL = 92
"""Width of a head's panel, in points."""


def build_report(models: Sequence[ModelFindings]) -> Report:
    """Return the report on models, at least one. Equal findings give identical reports."""
    sentences, parts = [write_verdict(models)], list[Sheet | Figure]([build_models_sheet(models)])
    parts += draw_scores(models)
    for model in models:
        prefix = f"{model.name}: " if len(models) > 1 else ""
        parts += _parts(model, prefix)
        layers = verdicts.describe_layers([*model.by_layer], model.num_layers, embedded=model.table is not None)
        sentences += [prefix + layers] if layers else []
    column, rows = Column("", left=True, wraps=True), [[sentence] for sentence in METHOD]
    parts.append(Sheet.of("How this is measured", [column], rows, name_column=-1, folded=True))
    title = f"What did {'these models' if len(models) > 1 else models[0].name} learn about position?"
    values = {model.name: model for model in models}
    methods = " ".join(model.position for model in models)
    return Report(title, sentences, parts, values, numbers="findings.json", methods=methods)


def _parts(model: ModelFindings, prefix: str) -> list[Sheet | Figure]:
    """Return the figures and the table of one model. With a prefix, it is one of several, and a click opens them."""
    folded, parts = bool(prefix), list[Sheet | Figure]()
    if model.table is not None:
        caption = (
            f"Toeplitzness {model.table.toeplitzness:.3f}: the share of the variance of P that the nearest matrix with "
            f"constant diagonals explains, for {model.length:,} embeddings E of width {model.table.width:,}. At 1, "
            "only the distance between two positions counts, as with sinusoids. P and its Toeplitz part share a scale. "
            "The highest and the lowest 0.5% of values have the colors of the ends."
        )
        paint = draw_embeddings(model.table)
        parts.append(Figure(f"{prefix}Position embeddings", paint, caption, (460, 205), folded))
    if model.heads:
        parts.append(draw_heads(f"{prefix}What position adds, head by head", model, folded=folded))
        parts.append(build_heads_sheet(model, folded=folded or len(model.heads) > MAX_OPEN_HEADS))
        parts.append(build_kernels_sheet(model))
    return parts


def build_models_sheet(models: Sequence[ModelFindings]) -> Sheet:
    """Return a table with a row for each model."""
    length, heads = Column("length", optional=True), Column("heads", left=True, wraps=True, optional=True)
    toeplitz = (Column("Toeplitz", of) for of in ("of P", "of heads"))
    has_scores = any(model.score is not None for model in models)
    scores = [Column("score")] if has_scores else []
    columns = [Column("model"), Column("position", left=True), length, *toeplitz, heads, *scores]
    rows: list[list[Cell | str]] = [
        [
            model.name,
            model.position,
            _cell(model.length, "{:,}".format),
            _cell(None if model.table is None else model.table.toeplitzness),
            _cell(model.mean_of_heads),
            Cell(count_kinds(model.heads) or DASH, order=len(model.heads)),
            *([_cell(model.score, plain)] if has_scores else []),
        ]
        for model in models
    ]
    return Sheet.of("Position", columns, rows)


def build_heads_sheet(model: ModelFindings, *, folded: bool) -> Sheet:
    """Return a table with a row for each head."""
    max_kernels = len(model.heads[0].fits)
    kernels = [count for count in range(1, max_kernels + 1) if count % 2 or max_kernels < 3]
    percent = partial(decimals, style=".0%")
    rows: list[list[Cell | str]] = [
        [
            _cell(head.layer, str),
            _cell(head.head, str),
            head.name,
            _cell(head.toeplitzness),
            _cell(head.range, "{:.2f}".format),
            *(_cell(float(head.fits[count - 1].explained), percent) for count in kernels),
        ]
        for head in model.heads
    ]
    columns: list[Column | str] = [
        "layer",
        "head",
        Column("is", left=True),
        Column("Toeplitz", "of scores"),
        "range",
        *(f"S={count}" for count in kernels),
    ]
    notes = (
        f"is: where the curve peaks (near: up to {NEAR} tokens away), or {POSITION_BLIND} if its range is below "
        f"{BLIND}. range: the largest difference that position makes to a score; Toeplitz: the share of a head's "
        "scores by position that a curve over offsets explains; S: the share of the curve that this number of TISA "
        "kernels explains.",
    )
    return Sheet.of(f"Heads of {model.name}", columns, rows, notes=notes, folded=folded)


def build_kernels_sheet(model: ModelFindings) -> Sheet:
    """Return a table with the numbers of each head's fits, to copy."""
    rows: list[list[Cell | str]] = []
    for head in model.heads:
        for count, fit in enumerate(head.fits, 1):
            numbers = (fit.amplitude, fit.sharpness.abs(), fit.center, fit.constant.flatten())
            lists = [", ".join(f"{number:.6g}" for number in values.tolist()) for values in numbers]
            rows.append([*(_cell(number, str) for number in (head.layer, head.head, count)), *lists])
    columns = ["layer", "head", "S", "amplitudes", "sharpness", "centers", "constant"]
    formula = "A score is constant + the sum of amplitude * exp(-sharpness * (offset - center)^2)."
    return Sheet.of(f"Kernels of {model.name}, in numbers", columns, rows, notes=(formula,), folded=True)


def draw_scores(models: Sequence[ModelFindings]) -> list[Figure]:
    """Return the TISA paper's Figure 2, each model's Toeplitzness and score, if several models have both."""
    of, shares = choose_toeplitzness(models)
    points = {
        model.name: (shares[model.name], model.score)
        for model in models
        if model.name in shares and model.score is not None
    }
    if len(points) < 2:
        return []
    columns, caption = [*zip(*points.values(), strict=True)], "Each point is a model."
    if len(points) > 2 and min(len(set(values)) for values in columns) > 1:
        caption += f" The correlation is {correlation(*columns):.2f}."

    def paint(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel=f"Toeplitzness of the {of}", ylabel="score")
        for name, point in points.items():
            axes.plot(*point, "o", color="C0")
            axes.annotate(name, point, (5, 4), textcoords="offset points", size=9)
        axes.margins(x=0.25, y=0.15)

    return [Figure("Score over Toeplitzness", paint, caption)]


def build_look(model: ModelFindings) -> dict[str, Any] | None:
    """Return a sentence and, for each head, what position adds to the score of each pair of its tokens.

    Heads of pooled layers have no score for a pair of tokens.
    """
    tokens = model.tokens
    heads = [head for head in model.heads if len(head.offsets) < 2 or int(head.offsets[1] - head.offsets[0]) == 1]
    if len(tokens) < 2 or not heads:
        return None
    index = torch.arange(len(tokens)) - torch.arange(len(tokens))[:, None] + model.length - 1
    matrices = [
        head.curve[index] if head.scores is None else head.scores[: len(tokens), : len(tokens)] for head in heads
    ]
    names = [f"layer {head.layer}, head {head.head} ({head.name})" for head in heads]
    rounded = [[[round(score, 2) for score in row] for row in matrix.tolist()] for matrix in matrices]
    return {"tokens": [*tokens], "heads": [*zip(names, rounded, strict=True)]}


def _cell(number: float | None, show: Callable[[float], str] = decimals) -> Cell:
    return Cell(DASH if number is None else show(number), order=number)


def count_kinds(heads: Sequence[HeadFindings]) -> str:
    """Count the kinds of heads, as in "3 previous token, 1 far"."""
    counts = Counter(head.name for head in heads)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def write_verdict(models: Sequence[ModelFindings]) -> str:
    """Return one sentence about the models: the page's headline."""
    of, shares = choose_toeplitzness(models)
    low, high = (f"{end(shares.values(), default=0.0):.2f}" for end in (min, max))
    if len(shares) > 1 and low != high:
        lowest, highest = (join_words([name for name in shares if f"{shares[name]:.2f}" == end]) for end in (low, high))
        lead = f"The {of} of {highest} depend most on distance alone (Toeplitzness {high})"
        return f"{lead}, those of {lowest} least ({low})."
    parts, heads = [], [head for model in models for head in model.heads]
    if heads:
        led = [head for head in heads if head.name != POSITION_BLIND]
        layers, num_layers = len(models[0].by_layer), models[0].num_layers
        where = f"in {layers} of {num_layers} layers, " if len(models) == 1 and layers < num_layers else ""
        parts.append(
            f"{where}position tells {len(led)} of {len(heads)} head{'s' * (len(heads) > 1)} where to look"
            f"{f' ({count_kinds(led)})' if led else ''}"
        )
    if shares and of != "heads":
        parts.append(f"the {of} have a Toeplitzness of {high} (1: only distance matters)")
    sentence = "; ".join(parts) or "position has no effect of its own"
    return f"{sentence[0].upper()}{sentence[1:]}."


def choose_toeplitzness(models: Sequence[ModelFindings]) -> tuple[str, dict[str, float]]:
    """Choose the matrices whose Toeplitzness the verdict names; return their name, and the Toeplitzness by model.

    They are P if at least two models have a P, or if a single model has one, else the heads. P is preferred because the
    heads of relative methods are Toeplitz by design, which says nothing about what was learned.
    """
    shares = {model.name: model.table.toeplitzness for model in models if model.table is not None}
    if len(shares) >= min(2, len(models)):
        return "position embeddings", shares
    return "heads", {model.name: mean for model in models if (mean := model.mean_of_heads) is not None}


def downsample(matrix: Tensor, pixels: int) -> NDArray[np.float64]:
    """Shrink a square matrix to at most ``pixels`` rows by averaging blocks; only the last blocks may be smaller."""
    block = -(-len(matrix) // pixels)
    image = matrix.detach().double().cpu()[None, None]
    return np.asarray(avg_pool2d(image, block, ceil_mode=True, count_include_pad=False)[0, 0].numpy())


def find_limits(values: NDArray[np.float64], center: float | None = None) -> tuple[float, float]:
    """Return the ends of a scale that leaves out a few outliers. With a center, both ends are equally far from it."""
    low, high = (float(end) for end in np.percentile(values, (OUTLIERS, 100 - OUTLIERS)))
    if center is not None:
        reach = max(high - center, center - low)
        low, high = center - reach, center + reach
    # All values are equal, up to rounding.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    return low, high


def draw_embeddings(table: TableFindings) -> Callable[[Canvas], None]:
    """Return a function that paints P, its nearest Toeplitz matrix and their difference."""
    gram, part = downsample(table.gram, MAX_PIXELS), downsample(table.part, MAX_PIXELS)
    last, ends = len(table.gram) - 1, find_limits(gram)
    maps = (
        ("$P = E E^T$", gram, ends, colormaps["cividis"]),
        (f"Toeplitz part: {table.toeplitzness:.3f}", part, ends, colormaps["cividis"]),
        ("what is left", gram - part, find_limits(gram - part, 0.0), BLUE_TO_ORANGE),
    )

    def paint(figure: Canvas) -> None:
        for axes, (title, values, (low, high), colors) in zip(figure.subplots(1, 3), maps, strict=True):
            extent = (-0.5, last + 0.5, last + 0.5, -0.5)
            image = axes.imshow(values, cmap=colors, vmin=low, vmax=high, interpolation="nearest", extent=extent)
            axes.set_title(title, size=10)
            axes.set(xticks=sorted({0, last // 2, last}), yticks=sorted({0, last // 2, last}))
            axes.spines[:].set_visible(False)
            axes.grid(visible=False)
            figure.colorbar(image, ax=axes, location="bottom", aspect=30).outline.set_visible(False)

    return paint


def draw_heads(title: str, model: ModelFindings, *, folded: bool) -> Figure:
    """Return a figure with a panel for each head, one row per layer. They share one pair of axes, which is fast."""
    columns, row = max(map(len, model.by_layer.values())), PANEL + PANEL // 2 + 40
    width, height = 20 + columns * (PANEL + 12), 10 + len(model.by_layer) * row
    pixels = PANEL if len(model.by_layer) * columns <= 2 * MAX_OPEN_HEADS else PANEL // 2
    top_half = "the same at every offset"
    if any(head.scores is not None for head in model.heads):
        top_half = "the scores of all pairs, blue below and orange above the head's median"
    caption = (
        "Each panel is one head, with its Toeplitzness. Keys before the query are on the left, keys after it on the "
        f"right. Bottom: what the head adds to scores up to {SHOWN_OFFSETS} positions away, each on its own scale. "
        f"Top: {top_half}."
    )

    def paint(figure: Canvas) -> None:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), autoscale_on=False)
        axes.set_axis_off()

        def draw(curve: Tensor, left: int, bottom: int, high: int) -> None:
            lowest, highest = min(0.0, float(curve.min())), max(0.0, float(curve.max()))
            scale = high / max(highest - lowest, MIN_RANGE)
            zero, *up = (bottom - scale * (value - lowest) for value in (0.0, *curve.tolist()))
            line = {"color": rcParams["grid.color"], "linewidth": 0.6, "linestyle": "-"}
            axes.plot((left, left + PANEL), (zero, zero), **line)
            axes.plot((left + PANEL / 2,) * 2, (bottom, bottom - high), **line)
            across = np.linspace(left, left + PANEL, len(up)) if len(up) > 1 else [left + PANEL / 2]
            axes.plot(across, up, color="C0", linestyle="-", linewidth=1.2, marker="" if len(up) > 1 else "o")

        for number, (layer, heads) in enumerate(model.by_layer.items()):
            top = 30 + number * row
            axes.text(8, top + PANEL * 3 / 4, f"layer {layer}", size=8, rotation=90, va="center", ha="center")
            for column, head in enumerate(heads):
                left = 20 + column * (PANEL + 12)
                label = f"head {head.head}: {head.toeplitzness:.2f}\n{head.name}"
                axes.text(left, top - 3, label, size=9, va="bottom")
                curve, middle = head.curve, len(head.curve) // 2
                if head.scores is None:
                    draw(curve, left, top + PANEL - 4, PANEL - 4)
                else:
                    curve = curve - head.scores.double().mean()  # which softmax ignores
                    scores = downsample(head.scores, pixels)
                    low, high = find_limits(scores, float(head.scores.double().median()))
                    extent = left, left + PANEL, top + PANEL - 4, top
                    image = axes.imshow(scores, cmap=BLUE_TO_ORANGE, vmin=low, vmax=high, extent=extent, aspect="auto")
                    image.set_interpolation("nearest")
                near = curve[max(0, middle - SHOWN_OFFSETS) : middle + SHOWN_OFFSETS + 1]
                draw(near, left, top + PANEL + PANEL // 2, PANEL // 2)

    return Figure(title, paint, caption, (width, height), folded, build_look(model))
