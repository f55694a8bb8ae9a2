"""The report of an analysis: tables and figures of what models learned about position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from matplotlib import colormaps, rcParams
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ..analysis.findings import AttentionFindings, HeadFindings, ModelFindings, TableFindings
from ..analysis.fit import TisaFit
from ..analysis.naming import POSITION_BLIND, RULES
from ..errors import listed
from ..lab.report.figures import legend
from ..lab.report.report import Figure, Report
from ..lab.sheet import DASH, Cell, Column, Sheet, decimals, percent, plain, signed

NAMES = ("previous token", "next token", "local window", "global", "position-blind")
"""Kinds of heads in the order in which they are counted; other names follow."""
BLUE_TO_ORANGE = LinearSegmentedColormap.from_list(
    "blue to orange", ("#00294a", "#0072b2", "#7fbfe3", "#f7f7f7", "#f2b077", "#d55e00", "#5c2400")
)
"""For values on both sides of a middle. Color-blind people can read it, and cividis for small to large."""
OUTLIERS = 0.5
"""Percentage of pixels at each end of a scale that take the end's color, so that they do not stretch the scale."""
PIXELS = 256
"""The most pixels of P's side."""
HOW = (
    "P is E E^T of the position embeddings as they are stored, before any norm or projection.",
    "A score by position is the mean over pairs of words drawn independently from the vocabulary. It includes "
    "everything that the model does: norms, projections, biases and the division by the root of the head's width.",
    "If positions are embedded, the mean over all pairs is subtracted in the first layer, which softmax ignores.",
    "In deeper layers, every token is the mean state that the layer reads from random words. The score of two such "
    "tokens without position is subtracted, so what is left is the method's effect in that layer.",
    "Fits include a constant, which softmax ignores. Each offset counts as often as it occurs.",
    "Measured attention leaves out the first and the last token of a window if they are special; the attention that "
    "they receive is missing from the shares. The variance explained is that of log weights within rows.",
)
MOST_HEADS = 24
"""Up to this number of heads, each has its own line on a terminal; beyond it, each layer has one."""
LEAST = 1.0
"""The smallest range of scores of a panel: smaller differences hardly matter, and look flat."""
EVEN = 1.5
"""A head counts as even over all distances if its highest share is below this multiple of its mean share."""
NEAR = 32
"""Offsets on each side that a curve near 0 shows."""
PANEL = 92
"""Width of a head's panel, in points."""


def report_of(models: Sequence[ModelFindings], notes: Sequence[str]) -> Report:
    """Return the report on models, whose names are unique. Equal findings give identical reports.

    Args:
        models: the findings, at least one.
        notes: what was left out.
    """
    several = len(models) > 1
    parts: list[Sheet | Figure] = [*overview(models), models_sheet(models)]
    for model in models:
        parts += _parts(model, f"{model.name}: " if several else "")
    about = [(each.name, each.source, each.kind, _sizes(each)) for each in models]
    texts = ("source", "kind", "sizes", "", "the first rule that holds")
    source, kind, sizes, said, rule = (Column(name, left=True, wraps=True) for name in texts)
    parts += [
        Sheet.of("The models", ["model", source, kind, sizes], about, folded=True),
        Sheet.of("How this is measured", [said], [[sentence] for sentence in HOW], named=-1, folded=True),
        Sheet.of("How heads are named", ["name", rule], [*RULES.items()], folded=True),
    ]
    title = f"What did {'they' if several else models[0].name} learn about position?"
    sentences, values = [verdict(models), *related(models), *notes], {model.name: model for model in models}
    return Report(title, sentences, parts, values, numbers="findings.json")


def _parts(model: ModelFindings, prefix: str) -> list[Sheet | Figure]:
    """Return the figures and tables of one model. With a prefix, it is one of several, and a click opens them."""
    folded, parts, many = bool(prefix), list[Sheet | Figure](), len(model.heads) > MOST_HEADS
    if model.table is not None:
        caption = (
            f"Toeplitzness {model.table.toeplitzness:.3f}: the share of the variance of P that the nearest matrix with "
            f"constant diagonals explains, for {model.length:,} embeddings E of width {model.table.width:,}. At 1, "
            "only the distance between two positions counts, as with sinusoids. P and its Toeplitz part share a scale. "
            "The highest and the lowest 0.5% of values have the colors of the ends."
        )
        paint = embeddings(model.table)
        parts.append(Figure(f"{prefix}Position embeddings", paint, caption, (460, 205), folded))
    if model.heads:
        drawn = "that at any offset"
        if any(head.scores is not None for head in model.heads):
            drawn = "the scores of all pairs, blue below and orange above the head's median"
        caption = (
            "Each panel is a head with its Toeplitzness. Tokens before the one that looks are on the left, those after "
            f"it on the right. Below: what is added to scores up to {NEAR} positions away, each head with its own "
            f"heights. Above: {drawn}."
        )
        panels = {layer: [panel_of(head) for head in heads] for layer, heads in model.by_layer.items()}
        parts.append(grid(f"{prefix}What position adds, head by head", panels, caption, folded=folded))
        if many and not folded:
            parts.append(layers_sheet(model))
        parts.append(heads_sheet(model, folded=folded or many))
    if (attention := model.attention) is not None:
        caption = (
            "The mean share of attention that a head gives to each offset, on a square-root scale, measured on "
            f"{attention.tokens:,} tokens of {attention.source}. Above each panel stands where that share is highest, "
            "and how much of the variance of its log weights the offset alone explains."
        )
        panels = attention_panels(attention)
        parts.append(grid(f"{prefix}Where the heads look in text", panels, caption, folded=folded or many))
    return parts


def _sizes(model: ModelFindings) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in model.sizes.items())


def models_sheet(models: Sequence[ModelFindings]) -> Sheet:
    """Return a table with a row for each model, without the columns for which no model has anything."""
    toeplitz = [None if model.table is None else model.table.toeplitzness for model in models]
    columns: dict[Column, Sequence[Cell | str]] = {
        Column("model", wraps=True): [model.name for model in models],
        Column("position", left=True, wraps=True): [model.position for model in models],
        Column("step"): [_cell(model.step, "{:,}".format) for model in models],
        Column("score"): [_cell(model.score, plain) for model in models],
        Column("length"): [_cell(model.length, "{:,}".format) for model in models],
        Column("Toeplitz", "of P"): [_cell(share) for share in toeplitz],
        Column("Toeplitz", "of heads"): [_cell(model.mean_of_heads) for model in models],
        Column("heads", left=True, wraps=True): [
            Cell(counted(model.heads) or DASH, order=len(model.heads)) for model in models
        ],
    }
    shown = {
        column: cells
        for column, cells in columns.items()
        if not all(isinstance(cell, Cell) and cell.order is None for cell in cells)
    }
    return Sheet.of("Position", list(shown), list(zip(*shown.values(), strict=True)), sortable=True)


def layers_sheet(model: ModelFindings) -> Sheet:
    """Return a table with a row for each layer."""
    rows = [
        [
            _cell(layer, str),
            _cell(len(heads), str),
            Cell(counted(heads)),
            _cell(fmean(head.toeplitzness for head in heads)),
        ]
        for layer, heads in model.by_layer.items()
    ]
    columns = [Column("layer"), Column("heads"), Column("are", left=True, wraps=True), Column("Toeplitz", "mean")]
    return Sheet.of(f"Layers of {model.name}", columns, rows)


def heads_sheet(model: ModelFindings, *, folded: bool = False) -> Sheet:
    """Return a table with a row for each head. On a page, a pointer shows why a head has its name, and its kernels."""
    most = max(len(head.fits) for head in model.heads)
    kernels = [count for count in range(1, most + 1) if count % 2 or most < 3]
    rows = []
    for head in model.heads:
        cells = [
            _cell(head.layer, str),
            _cell(head.head, str),
            Cell(head.name, order=head.name, title=head.reason),
            _cell(head.toeplitzness),
            _cell(float(head.curve.max() - head.curve.min()), "{:.2f}".format),
        ]
        fits = [head.fits[count - 1] if count <= len(head.fits) else None for count in kernels]
        cells += [_cell(None if fit is None else float(fit.explained), percent, kernels_of(fit)) for fit in fits]
        if model.attention is not None:
            cells.append(_cell(float(model.attention.explained[head.layer, head.head]), percent))
        rows.append(cells)
    columns: list[Column | str] = [
        "layer",
        "head",
        Column("is", left=True),
        Column("Toeplitz", "of scores"),
        "range",
        *(f"S={count}" for count in kernels),
    ]
    said = [
        "range: the largest difference that position makes to a score",
        "Toeplitz: the share of a head's scores by position that a curve over offsets explains",
        "S: the share of the curve that this number of TISA kernels explains",
    ]
    if model.attention is not None:
        columns.append("measured")
        said.append("measured: the share of the variance of log attention weights in text that the offset explains")
    notes = (f"{'; '.join(said)}.",)
    return Sheet.of(f"Heads of {model.name}", columns, rows, notes=notes, sortable=True, folded=folded)


def _cell(number: float | None, show: Callable[[float], str] = decimals, title: str = "") -> Cell:
    return Cell(DASH if number is None else show(number), order=number, title=title)


def kernels_of(fit: TisaFit | None) -> str:
    """Format the kernels of a fit, if there is one, for people: strongest first."""
    if fit is None:
        return ""
    parts = zip(fit.amplitude.tolist(), fit.sharpness.tolist(), fit.center.tolist(), strict=True)
    rounded = [
        [float(f"{number:.3g}") for number in kernel] for kernel in sorted(parts, key=lambda each: -abs(each[0]))
    ]
    return "; ".join(f"{signed(a)} at {signed(c)}, b {plain(abs(b))}" for a, b, c in rounded)


def counted(found: Sequence[HeadFindings]) -> str:
    """Count the kinds of heads, as in "3 previous token, 1 global"."""
    counts = Counter(head.name for head in found)
    names = [*(name for name in NAMES if name in counts), *sorted(counts.keys() - set(NAMES))]
    return ", ".join(f"{counts[name]} {name}" for name in names)


def verdict(models: Sequence[ModelFindings]) -> str:
    """Answer in one sentence what the models learned, which is the page's headline."""
    by_step = sorted(
        (model.step, model.table.toeplitzness) for model in models if model.table and model.step is not None
    )
    if len(by_step) > 1:
        (first, before), (last, after) = by_step[0], by_step[-1]
        if f"{before:.2f}" == f"{after:.2f}":
            return f"Toeplitzness stays at {after:.2f} from step {first:,} to step {last:,}."
        return f"Toeplitzness goes from {before:.2f} at step {first:,} to {after:.2f} at step {last:,}."
    of, shares = toeplitzness_of(models)
    low, high = (f"{end(shares.values(), default=0.0):.2f}" for end in (min, max))
    if len(shares) > 1 and low != high:
        least, most = (listed([name for name in shares if f"{shares[name]:.2f}" == end]) for end in (low, high))
        return (
            f"Distance alone counts the most for the {of} of {most} (Toeplitzness {high}) and the least for those of "
            f"{least} ({low})."
        )
    parts, heads = [], [head for model in models for head in model.heads]
    if heads:
        led = sum(head.name != POSITION_BLIND for head in heads)
        parts.append(
            f"position tells {led} of {len(heads)} head{'s' * (len(heads) > 1)} where to look ({counted(heads)})"
        )
    if shares and of != "heads":
        parts.append(f"the {of} have a Toeplitzness of {high}, where 1 means that distance alone counts")
    sentence = "; ".join(parts) or "nothing to see: position has no effect of its own"
    return f"{sentence[0].upper()}{sentence[1:]}."


def toeplitzness_of(models: Sequence[ModelFindings]) -> tuple[str, dict[str, float]]:
    """Return what the Toeplitzness is of, and its value by model.

    It is that of P if at least two models have a P, or one alone, else that of heads. P is preferred because the heads
    of relative methods are Toeplitz by design, which says nothing about what was learned.
    """
    shares = {model.name: model.table.toeplitzness for model in models if model.table is not None}
    if len(shares) >= min(2, len(models)):
        return "position embeddings", shares
    return "heads", {model.name: mean for model in models if (mean := model.mean_of_heads) is not None}


def averaged(matrix: Tensor, pixels: int) -> NDArray[np.float64]:
    """Shrink a square matrix to at most ``pixels`` rows by averaging blocks; only the last blocks may be smaller."""
    block = -(-len(matrix) // pixels)
    grid = matrix.detach().double().cpu()[None, None]
    return np.asarray(avg_pool2d(grid, block, ceil_mode=True, count_include_pad=False)[0, 0].numpy())


def limits(values: NDArray[np.float64], center: float | None = None) -> tuple[float, float]:
    """Return the ends of a scale that leaves out a few outliers. With a center, both ends are equally far from it."""
    low, high = (float(end) for end in np.percentile(values, (OUTLIERS, 100 - OUTLIERS)))
    if center is not None:
        reach = max(high - center, center - low)
        low, high = center - reach, center + reach
    # All values are equal, up to rounding.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    return low, high


def embeddings(table: TableFindings) -> Callable[[Canvas], None]:
    """Draw P, its best Toeplitz part and what is left."""
    gram, part = averaged(table.gram, PIXELS), averaged(table.part, PIXELS)
    last, ends = len(table.gram) - 1, limits(gram)
    maps = (
        ("$P = E E^T$", gram, ends, colormaps["cividis"]),
        (f"Toeplitz part: {table.toeplitzness:.3f}", part, ends, colormaps["cividis"]),
        ("what is left", gram - part, limits(gram - part, 0.0), BLUE_TO_ORANGE),
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


@dataclass(frozen=True)
class Panel:
    """The panel of one head.

    Args:
        title: two lines above it.
        curve: (m,), values at offsets from -(m // 2) to m // 2, of which those near 0 are drawn.
        heights: the values at the bottom and at the top.
        above: (n, n) scores, or (m,) a curve at all offsets, which are drawn above.
    """

    title: str
    curve: Tensor
    heights: tuple[float, float]
    above: Tensor | None = None


def panel_of(head: HeadFindings) -> Panel:
    """Return the panel of what position adds to a head's scores, without their mean, which softmax ignores."""
    curve = head.curve if head.scores is None else head.curve - head.scores.double().mean()
    low = min(0.0, float(curve.min()))
    heights = low, max(0.0, float(curve.max()), low + LEAST)
    title = f"head {head.head}: {head.toeplitzness:.2f}\n{head.name}"
    return Panel(title, curve, heights, curve if head.scores is None else head.scores)


def attention_panels(attention: AttentionFindings) -> dict[int, list[Panel]]:
    """Return the panels of the mean share of attention that each head gives to each offset, with one scale.

    Heights are square roots of the shares; otherwise heads that look at one place would press all others flat. Layers
    of pooled sequences, which have no shares, are left out.
    """
    shown = {number: shares for number, shares in enumerate(attention.shares.double()) if bool(shares.isfinite().all())}
    every = torch.cat([*shown.values()])
    # An even head should look even.
    heights = 0.0, max(float(every.max()), 5 * float(every.mean())) ** 0.5
    offsets = attention.offsets.tolist()
    return {
        layer: [
            Panel(f"head {number}: {peak(offsets, shares.tolist())}\n{percent(explained)}", shares.sqrt(), heights)
            for number, (shares, explained) in enumerate(zip(heads, attention.explained[layer].tolist(), strict=True))
        ]
        for layer, heads in shown.items()
    }


def peak(offsets: Sequence[int], shares: Sequence[float]) -> str:
    """Name the offset with the highest share, unless that is hardly above the mean."""
    highest = max(shares)
    even = highest < EVEN * sum(shares) / len(shares)
    return "even" if even else f"{signed(offsets[shares.index(highest)])}, {highest:.0%}"


def grid(title: str, layers: Mapping[int, Sequence[Panel]], caption: str, *, folded: bool) -> Figure:
    """Return a figure with the panels of all heads, one row per layer. They share one pair of axes, which is fast."""
    columns, first = max(map(len, layers.values())), next(iter(layers.values()))[0]
    above, below = 0 if first.above is None else PANEL, PANEL // 2
    row = above + below + 40
    width, height = 20 + columns * (PANEL + 12), 10 + len(layers) * row
    pixels = PANEL if len(layers) * columns <= 2 * MOST_HEADS else PANEL // 2

    def paint(figure: Canvas) -> None:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), autoscale_on=False)
        axes.set_axis_off()

        def draw(panel: Panel, most: int, left: int, bottom: int, high: int) -> None:
            middle, (least, most_of_all) = len(panel.curve) // 2, panel.heights
            reach = min(most, middle)
            near = panel.curve[middle - reach : middle + reach + 1]
            zero, *up = (bottom - high * (value - least) / (most_of_all - least) for value in (0.0, *near.tolist()))
            line = {"color": rcParams["grid.color"], "linewidth": 0.6}
            axes.plot((left, left + PANEL), (zero, zero), **line)
            axes.plot((left + PANEL / 2,) * 2, (bottom, bottom - high), **line)
            across = np.linspace(left, left + PANEL, len(up)) if reach else [left + PANEL / 2]
            axes.plot(across, up, color="C0", linewidth=1.2, marker="" if reach else "o")

        for number, (layer, panels) in enumerate(layers.items()):
            top = 30 + number * row
            axes.text(8, top + (above + below) / 2, f"layer {layer}", size=8, rotation=90, va="center", ha="center")
            for column, panel in enumerate(panels):
                left = 20 + column * (PANEL + 12)
                axes.text(left, top - 3, panel.title, size=7, va="bottom")
                if panel.above is not None and panel.above.ndim == 2:
                    scores = averaged(panel.above, pixels)
                    low, high = limits(scores, float(panel.above.double().median()))
                    extent = left, left + PANEL, top + above - 4, top
                    image = axes.imshow(scores, cmap=BLUE_TO_ORANGE, vmin=low, vmax=high, extent=extent, aspect="auto")
                    image.set_interpolation("nearest")
                elif panel.above is not None:
                    draw(panel, len(panel.curve), left, top + above - 4, above - 4)
                draw(panel, NEAR, left, top + above + below, below)

    return Figure(title, paint, caption, (width, height), folded)


def related(models: Sequence[ModelFindings]) -> list[str]:
    """Return how the models' scores go with their Toeplitzness, in a sentence, if at least three differ in both."""
    scored = {model.name: model.score for model in models if model.score is not None}
    of, shares = toeplitzness_of([model for model in models if model.name in scored])
    scores = [scored[name] for name in shares]
    if len(shares) < 3 or len(set(shares.values())) == 1 or len(set(scores)) == 1:
        return []
    found = float(np.corrcoef([*shares.values()], scores)[0, 1])
    return [f"Scores and the Toeplitzness of {of} correlate by {decimals(found, 2)} over {len(shares)} models."]


def overview(models: Sequence[ModelFindings]) -> list[Figure]:
    """Return the figure of Toeplitzness by model or over the steps of a training, if there are at least two."""
    trained = sum(model.step is not None for model in models) > 1
    shown = sorted((model for model in models if model.step is not None), key=lambda each: each.step or 0)
    shown = shown if trained else list(models)
    places = [model.step or 0 for model in shown] if trained else range(len(shown))
    measures = {
        "P": [None if model.table is None else model.table.toeplitzness for model in shown],
        "heads, mean": [model.mean_of_heads for model in shown],
    }
    measures = {name: shares for name, shares in measures.items() if any(share is not None for share in shares)}

    def paint(figure: Canvas) -> None:
        axes = figure.add_subplot()
        for (name, shares), marker in zip(measures.items(), "os", strict=False):
            points = [(place, share) for place, share in zip(places, shares, strict=True) if share is not None]
            x, y = zip(*points, strict=True)
            axes.plot(*((x, y) if trained else (y, x)), f"{marker}{'-' * trained}", markersize=4.5, label=name)
        if trained:
            axes.set(xlabel="training step", ylabel="Toeplitzness", ylim=(0, 1.03))
        else:
            axes.set_yticks(places, [model.name for model in shown])
            axes.set(xlabel="Toeplitzness", xlim=(0, 1.03), ylim=(len(shown) - 0.5, -0.5))
        legend(figure)

    title, height = ("Toeplitzness over training", 300) if trained else ("Toeplitzness", 70 + 25 * len(shown))
    note = "At 1, only the distance between two positions counts."
    return [Figure(title, paint, note, (420, height))] if len(shown) > 1 and measures else []
