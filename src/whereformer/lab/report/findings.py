"""The report of an analysis: tables and figures of what models learned about position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np
import torch
from markupsafe import Markup
from matplotlib import rcParams
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from ...analysis.findings import AttentionFindings, HeadFindings, ModelFindings, TableFindings
from ...analysis.fit import TisaFit
from ...analysis.naming import RULES
from ..sheet import DASH, Cell, Column, Row, Sheet, decimals, percent, plain, signed
from . import figures, page, panels
from .heatmaps import PALETTES, Heatmap, averaged, heatmap, limits
from .panels import SMALL, Range
from .report import Figure, Report

Paint = Callable[[Canvas], None]
Point = tuple[str, float, float]
"""A model's name, Toeplitzness and score."""
NAMES = ("previous token", "next token", "local window", "global", "position-blind")
"""Kinds of heads in the order of legends; other names follow."""
BLIND = "position-blind"
SIZE = 420, 300
PIXELS, CORNER = 256, 32
"""The most pixels of a large matrix's side, and positions in the close-up of a head's scores."""
PANEL_PIXELS = {50: 128, 160: 96, 500: 64, 10**9: 32}
"""Pixels of each head's matrix by the most heads on a page: pages of 12 layers with 12 heads stay below 5 MB."""
MOST_HEADS = 24
"""Up to this number of heads, each has its own line on a terminal; beyond it, each layer has one."""
DETAILED = 300
"""Up to this number of heads on a page, each is drawn with a close-up and all its fits."""
LEAST = 1.0
"""The smallest range of scores of a small panel."""
EVEN = 1.5
"""A head counts as even over all distances if its highest share is below this multiple of its mean share."""
PANEL = 92
"""Width of a head's panel in a file, in points."""


def report_of(models: Sequence[ModelFindings], notes: Sequence[str]) -> Report:
    """Return the report on models, whose names are unique. Equal findings give identical reports.

    Args:
        models: the findings, at least one.
        notes: what was left out.
    """
    several = len(models) > 1
    missing = [f"{model.name}: {why}" for model in models for why in (model.no_table, model.no_heads) if why]
    named = [head.name for model in models for head in model.heads]
    looks = looks_of(named)
    parts: list[Sheet | Figure] = [models_sheet(models, missing), *overviews(models)]
    for number, model in enumerate(models):
        prefix = f"{model.name}: " if several else ""
        parts += _parts(model, prefix, f"model-{number}", looks, len(named))
    about = [(each.name, each.source, each.kind, f"{each.length:,}", _sizes(each)) for each in models]
    parts.append(Sheet.of("The models", ["model", "source", "kind", "analyzed", "sizes"], about, folded=True))
    parts.append(Sheet.of("How heads are named", ["name", "the first rule that holds"], [*RULES.items()], folded=True))
    title = f"What did {'they' if several else models[0].name} learn about position?"
    return Report(title, [verdict(models), *notes], parts, {model.name: model for model in models})


def _parts(
    model: ModelFindings, prefix: str, name: str, looks: Mapping[str, figures.Series], all_heads: int
) -> list[Sheet | Figure]:
    """Return the figures and tables of one model. With a prefix, it is one of several, and a click opens them."""
    folded, parts = bool(prefix), list[Sheet | Figure]()
    if model.table is not None:
        caption = (
            f"Toeplitzness {model.table.toeplitzness:.3f}: the share of the variance of P that the nearest matrix with "
            f"constant diagonals explains, for {model.length:,} embeddings E of width {model.table.width:,}. At 1, "
            "only the distance between two positions counts, as with sinusoids. P and its Toeplitz part share a scale. "
            "The highest and the lowest 0.5% of values have the colors of the ends."
        )
        paint = embeddings(model.table)
        parts.append(Figure(f"{prefix}Position embeddings", paint, caption, (720, 290), folded))
    if model.heads:
        caption = (
            "Each panel is a head with its Toeplitzness. Tokens before the one that looks are on the left, tokens "
            "after it on the right. On the page, click a panel to enlarge it; the arrow keys then go from head to head."
        )
        if model.heads[0].scores is not None:
            caption += " Heatmaps show the scores of all pairs: blue below and orange above the head's median."
        *size, paint = head_panels(model)
        pixels = next(size for most, size in PANEL_PIXELS.items() if all_heads <= most)

        def draw() -> Markup:
            return head_grid(model, f"{name}-heads", looks, pixels, detailed=all_heads <= DETAILED)

        title = f"{prefix}What position adds, head by head"
        parts.append(Figure(title, paint, caption, (size[0], size[1]), folded, draw))
        many = len(model.heads) > MOST_HEADS
        if many and not folded:
            parts.append(heads_sheet(model, layers=True))
        parts.append(heads_sheet(model, f"{name}-heads", looks, folded=folded or many))
    if (attention := model.attention) is not None:
        caption = (
            "The mean share of attention that a head gives to each offset, on a square-root scale, measured on "
            f"{attention.tokens:,} tokens of {attention.source}. Below each panel stands where that share is highest, "
            "and how much of the variance of its log weights the offset alone explains."
        )
        title = f"{prefix}Where the heads look in text"
        fold = folded or attention.explained.numel() > MOST_HEADS
        parts.append(
            Figure(title, None, caption, folded=fold, page=lambda: attention_grid(attention, f"{name}-attention"))
        )
    if model.how:
        parts.append(Sheet.of(f"{prefix}How this was measured", [""], [[said] for said in model.how], folded=True))
    return parts


def _sizes(model: ModelFindings) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in model.sizes.items())


def models_sheet(models: Sequence[ModelFindings], notes: Sequence[str]) -> Sheet:
    """Return a table with a row for each model, without the columns for which no model has anything."""
    toeplitz = [None if model.table is None else model.table.toeplitzness for model in models]
    columns = {
        Column("model", wraps=True): [Cell(model.name, order=model.name) for model in models],
        Column("position", left=True, wraps=True): [Cell(model.position, order=model.position) for model in models],
        Column("step"): [_cell(model.step, "{:,}".format) for model in models],
        Column("score", first="descending"): [_cell(model.score, plain) for model in models],
        Column("length"): [_cell(model.length, "{:,}".format) for model in models],
        Column("Toeplitz", "of P", "descending"): [_cell(share) for share in toeplitz],
        Column("Toeplitz", "of heads", "descending"): [_cell(model.mean_of_heads) for model in models],
        Column("heads", "", "descending", left=True, wraps=True): [
            Cell(counted(model.heads) or DASH, order=len(model.heads)) for model in models
        ],
    }
    shown = {column: cells for column, cells in columns.items() if any(cell.order is not None for cell in cells)}
    return Sheet.of("Position", list(shown), list(zip(*shown.values(), strict=True)), notes=tuple(notes), sortable=True)


def heads_sheet(
    model: ModelFindings,
    name: str = "",
    looks: Mapping[str, figures.Series] | None = None,
    *,
    layers: bool = False,
    folded: bool = False,
) -> Sheet:
    """Return a table with a row for each head.

    Args:
        model: the findings.
        name: the id of the heads' grid on a page.
        looks: the look of each kind of head on a page.
        layers: whether each row is a layer instead, with means over its heads.
        folded: whether it is on pages only.
    """
    most = max((len(head.fits) for head in model.heads), default=0)
    kernels = [count for count in range(1, most + 1) if count % 2 or most < 3]
    rows = []
    for number, layer in enumerate(model.by_layer.values()):
        for index, found in enumerate([layer] if layers else [[head] for head in layer]):
            first = found[0]
            look = None if looks is None else looks[first.name]
            place = len(found) if layers else first.head
            cells = [
                _cell(first.layer, str),
                Cell(str(place), order=place, link=f"{name}-{number}-{index}" if name else ""),
                Cell(counted(found) if layers else first.name, order=first.name, swatch=look),
                _cell(fmean(head.toeplitzness for head in found)),
                _cell(fmean(float(head.curve.max() - head.curve.min()) for head in found), "{:.2f}".format),
            ]
            shares = [
                fmean(float(head.fits[count - 1].explained) for head in found) if count <= len(first.fits) else None
                for count in kernels
            ]
            if model.attention is not None:
                shares.append(fmean(float(model.attention.explained[head.layer, head.head]) for head in found))
            cells += [Cell(percent(share), order=share) for share in shares]
            rows.append(Row(tuple(cells), "" if look is None else look.group))
    columns = [
        Column("layer"),
        Column("heads" if layers else "head"),
        Column("are" if layers else "is", left=True, wraps=layers),
        Column("Toeplitz", "of scores", "descending"),
        Column("range", first="descending"),
        *(Column(f"S={count}", first="descending") for count in kernels),
    ]
    said = [
        "range: the largest difference that position makes to a score",
        "Toeplitz: the share of a head's scores by position that a curve over offsets explains",
        "S: the share of the curve that this number of TISA kernels explains",
    ]
    if layers:
        said.insert(0, "means over heads")
    if model.attention is not None:
        columns.append(Column("measured", first="descending"))
        said.append("measured: the share of the variance of log attention weights in text that the offset explains")
    title, note = f"{'Layers' if layers else 'Heads'} of {model.name}", f"{'; '.join(said)}."
    return Sheet.of(title, columns, rows, notes=(note,), sortable=True, folded=folded)


def _cell(number: float | None, show: Callable[[float], str] = decimals) -> Cell:
    return Cell(DASH if number is None else show(number), order=number)


def looks_of(names: Sequence[str]) -> dict[str, figures.Series]:
    """Return the look of each kind of head in ``names``, the same in every figure of the page."""
    # Each known kind keeps its hue, whichever other kinds there are.
    every = [*NAMES, *sorted(set(names) - set(NAMES))]
    by_name = dict(zip(every, figures.series(len(every), every.index(BLIND)), strict=True))
    return {name: look for name, look in by_name.items() if name in names}


def counted(found: Sequence[HeadFindings]) -> str:
    """Count the kinds of heads, as in "3 previous token, 1 global"."""
    counts = Counter(head.name for head in found)
    return ", ".join(f"{counts[name]} {name}" for name in looks_of(list(counts)))


def verdict(models: Sequence[ModelFindings]) -> str:
    """Summarize the page in one sentence, its headline."""
    if len(models) == 1:
        sentence = _summary(models[0])
        return sentence[0].upper() + sentence[1:]
    tables = [(model.table.toeplitzness, model) for model in models if model.table is not None]
    by_step = sorted((model.step, share) for share, model in tables if model.step is not None)
    if len(by_step) > 1:
        (first, before), (last, after) = by_step[0], by_step[-1]
        return f"Toeplitzness goes from {before:.2f} at step {first:,} to {after:.2f} at step {last:,}"
    if len(tables) > 1:
        (low, lowest), *_, (high, highest) = sorted(tables, key=lambda each: each[0])
        return (
            f"The position embeddings of {highest.name} are the most Toeplitz ({high:.2f}), those of {lowest.name} the "
            f"least ({low:.2f})"
        )
    return f"{len(models)} models: {counted([head for model in models for head in model.heads]) or 'no heads to name'}"


def _summary(model: ModelFindings) -> str:
    parts = []
    if model.table is not None:
        parts.append(f"position embeddings of Toeplitzness {model.table.toeplitzness:.2f}")
    if model.heads:
        count = len(model.heads)
        parts.append(f"{count} heads: {counted(model.heads)}" if count > 1 else f"its head is {model.heads[0].name}")
    return "; ".join(parts) or "nothing to see: position has no effect of its own"


def head_grid(
    model: ModelFindings, name: str, looks: Mapping[str, figures.Series], pixels: int, *, detailed: bool
) -> Markup:
    """Draw all heads of a model; ``detailed`` adds close-ups and all fits."""
    note = f"small: {near(len(model.heads[0].curve))}; heights: each head's own range, but at least {LEAST:g}"
    rows: list[panels.Row] = []
    for layer, found in model.by_layer.items():
        drawn = []
        for head in found:
            fits = head.fits if detailed else head.fits[-1:]
            curve, spread = curve_of(head), head.spread if bool(head.spread.any()) else None
            measured = None if model.attention is None else float(model.attention.explained[layer, head.head])
            more = page.render(
                page.TEMPLATES / "head.html.j2",
                head=head,
                fits=[(fit.num_kernels, percent(float(fit.explained), 1), kernels_of(fit)) for fit in fits],
                measured=None if measured is None else percent(measured),
                spread=spread is not None,
            )
            drawing = panels.draw(
                head.offsets,
                curve,
                height_of(curve),
                label=f"Curve of layer {layer}, head {head.head}",
                spread=spread,
                others=[fit.curve(head.offsets) - (head.curve - curve)[0] for fit in fits],
            )
            drawn.append(
                panels.Panel(
                    f"head {head.head}",
                    looks[head.name],
                    head.name,
                    (decimals(head.toeplitzness, 2),),
                    drawing,
                    "mean score" if head.scores is not None else "added to scores",
                    maps_of(head, pixels, detailed=detailed),
                    Markup(more),
                )
            )
        rows.append(panels.Row(f"layer {layer}", "" if rows else note, tuple(drawn)))
    counts = Counter(head.name for head in model.heads)
    legend = {kind: (look, counts[kind]) for kind, look in looks.items() if counts[kind]}
    return panels.grid(rows, name, f"Heads of {model.name}", legend)


def maps_of(head: HeadFindings, pixels: int, *, detailed: bool) -> tuple[tuple[str, Heatmap], ...]:
    """Draw a head's scores around their median, and for a long matrix also a close-up of its middle."""
    if head.scores is None:
        return ()
    scores = head.scores.double()
    found = [("scores: query down, key across", heatmap(scores, pixels=pixels, center=float(scores.median())))]
    if len(scores) > pixels and detailed:
        first = (len(scores) - CORNER) // 2
        middle = scores[first : first + CORNER, first : first + CORNER]
        caption = f"positions {first} to {first + CORNER - 1}, around their median"
        found.append((caption, heatmap(middle, pixels=CORNER, center=float(middle.median()), first=first)))
    return tuple(found)


def kernels_of(fit: TisaFit) -> str:
    """Format the kernels for people, strongest first."""
    parts = zip(fit.amplitude.tolist(), fit.sharpness.tolist(), fit.center.tolist(), strict=True)
    rounded = [
        [float(f"{number:.3g}") for number in kernel] for kernel in sorted(parts, key=lambda each: -abs(each[0]))
    ]
    return "; ".join(f"{signed(a)} at {signed(c)}, b {plain(abs(b))}" for a, b, c in rounded)


def attention_grid(attention: AttentionFindings, name: str) -> Markup:
    """Draw the mean share of attention that each head gives to each offset, and name the highest in each panel.

    Heights are square roots of the shares; otherwise heads that look at one place would press all others flat. Layers
    of pooled sequences, which have no shares, are left out.
    """
    offsets, look = attention.offsets.tolist(), figures.series(1)[0]
    shown = {number: shares for number, shares in enumerate(attention.shares.double()) if bool(shares.isfinite().all())}
    every = torch.cat([*shown.values()])
    # An even head should look even.
    highest = max(float(every.max()), 5 * float(every.mean()))
    rows: list[panels.Row] = []
    for layer, heads in shown.items():
        drawn = []
        for number, (shares, explained) in enumerate(zip(heads, attention.explained[layer].tolist(), strict=True)):
            label = f"Mean attention, per head and offset: layer {layer}, head {number}"
            curve = panels.draw(
                offsets, shares.sqrt(), Range(0.0, highest**0.5), label=label, ticks=share_ticks(float(shares.max()))
            )
            said = peak(offsets, shares.tolist()), f"{percent(explained)} by offset"
            drawn.append(panels.Panel(f"head {number}", look, "", said, curve, "mean share of attention"))
        note = "" if rows else f"small: {near(len(offsets))}; heights 0 to {highest:.0%}"
        rows.append(panels.Row(f"layer {layer}", note, tuple(drawn)))
    return panels.grid(rows, name, "Mean attention, per head and offset")


def near(offsets: int) -> str:
    """Describe which of a curve's offsets the small panels show."""
    reach = min(SMALL, offsets // 2)
    return f"offsets {signed(-reach)} to {signed(reach)}"


def peak(offsets: Sequence[int], shares: Sequence[float]) -> str:
    """Name the offset with the highest share, unless that is hardly above the mean."""
    highest = max(shares)
    even = highest < EVEN * sum(shares) / len(shares)
    return "even" if even else f"{signed(offsets[shares.index(highest)])}: {highest:.0%}"


def share_ticks(highest: float) -> dict[float, str]:
    """Return ticks at the square roots of round shares, far enough apart to be read."""
    ticks: dict[float, str] = {}
    for mark in (100, 80, 60, 40, 20, 10, 5, 2, 1, 0.5, 0.2, 0.1, 0):
        height = (mark / 100) ** 0.5
        if mark / 100 <= highest and (not ticks or min(ticks) - height > 0.15 * highest**0.5):
            ticks[height] = f"{mark:g}%"
    return ticks


def embeddings(table: TableFindings) -> Paint:
    """Draw P, its best Toeplitz part and what is left."""
    gram, part = averaged(table.gram, PIXELS), averaged(table.part, PIXELS)
    last, ends = len(table.gram) - 1, limits(gram)
    maps = (
        ("$P = E E^T$", gram, ends, "sequential"),
        (f"its best Toeplitz part: {table.toeplitzness:.3f}", part, ends, "sequential"),
        ("what is left", gram - part, limits(gram - part, 0.0), "diverging"),
    )

    def paint(figure: Canvas) -> None:
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

    def paint(figure: Canvas) -> None:
        figure.set_layout_engine("none")
        figure.text(28 / width, 8 / height, note, size=7, color=rcParams["axes.labelcolor"])
        edges = {"left": 28 / width, "right": 1 - 8 / width, "bottom": 24 / height, "top": 1 - 32 / height}
        spaces = {"height_ratios": ratios * len(layers), "hspace": 0.35, "wspace": 0.12}
        grid = figure.subplots(len(layers) * len(ratios), columns, squeeze=False, gridspec_kw=edges | spaces)
        line = {"color": rcParams["grid.color"], "linewidth": 0.6}
        for axes in grid.flat:
            axes.set_axis_off()
        for row, (layer, found) in enumerate(layers.items()):
            beside = grid[row * len(ratios), 0]
            beside.text(-0.12, 0.5, f"layer {layer}", size=8, rotation=90, va="center", transform=beside.transAxes)
            for head, places in zip(found, grid[row * len(ratios) :].T, strict=False):
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


def overviews(models: Sequence[ModelFindings]) -> list[Figure]:
    """Return the figures of Toeplitzness over training and over scores, if there are at least two points to show."""
    stepped = sorted([(model.step, model) for model in models if model.step is not None], key=lambda each: each[0])
    lines = {
        "P": [(step, model.table.toeplitzness) for step, model in stepped if model.table is not None],
        "heads, mean": [(step, mean) for step, model in stepped if (mean := model.mean_of_heads) is not None],
    }
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    points, measure = scatter_points(models)

    def over_steps(figure: Canvas) -> None:
        axes = figure.add_subplot(xlabel="training step", ylabel="Toeplitzness", ylim=(0, 1.03))
        for (name, points), marker in zip(lines.items(), "os", strict=False):
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4.5, label=name)
        if len(lines) > 1:
            axes.legend(frameon=False, loc="best")

    def over_scores(figure: Canvas) -> None:
        axes = figure.add_subplot(xlabel=measure, ylabel="score")
        axes.margins(0.12)
        center = np.median([x for _, x, _ in points])
        for name, x, y in points:
            axes.plot(x, y, "o", color="C0", markersize=5.5)
            side, away = ("left", 8) if x <= center else ("right", -8)
            axes.annotate(name, (x, y), (away, 0), textcoords="offset points", ha=side, va="center", size=9)

    found = []
    if lines:
        note = "At 1, only the distance between two positions counts."
        found.append(Figure("Toeplitzness over training", over_steps, note, SIZE))
    if len(points) > 1:
        note = f"Each point is a model{correlation(points)}."
        found.append(Figure("Toeplitzness and score", over_scores, note, SIZE))
    return found


def correlation(points: Sequence[Point]) -> str:
    """Return Pearson's correlation and the number of points as text; "" for fewer than three points."""
    _, first, second = zip(*points, strict=True)
    if len(points) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return ""
    return f"; correlation {decimals(float(np.corrcoef(first, second)[0, 1]), 2)} over {len(points)} models"
