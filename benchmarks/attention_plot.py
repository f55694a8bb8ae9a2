"""The picture of an attention benchmark: times relative to attention without positions, over sequence length."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from operator import attrgetter

from attention_ways import DENSE, Row, shown_backend
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from whereformer.lab.report import figures

READABLE = 5
"""The most kinds of terms whose lines can be told apart in a plot."""
FOREMOST = ("bias", "t5", "shaw", "padded")
"""The kinds that are drawn first if there are more."""
TICKS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def plot(rows: Sequence[Row]) -> dict[str, bytes]:
    """Draw a backend next to a dense bias, which is what most code does today.

    If more kinds of terms were measured than a plot can show, only the most important are drawn.

    Returns:
        A PNG and an SVG file by name, or nothing if nothing was timed. The same rows give the same picture.
    """
    timed = [row for row in rows if row.ratio is not None]
    ours = [row for row in timed if row.way == shown_backend(rows)]
    kinds = sorted(dict.fromkeys(row.terms for row in ours), key=lambda kind: kind not in FOREMOST)[:READABLE]
    lines = {kind: [row for row in ours if row.terms == kind] for kind in kinds}
    if not lines:
        return {}
    lines["dense bias"] = [row for row in timed if row.way == DENSE.name and row.terms == "bias"]
    dtypes = sorted({row.dtype for row in ours}, reverse=True)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(len(dtypes), 2, sharex=True, sharey="row", squeeze=False)
        for two, dtype in zip(panels, dtypes, strict=True):
            for axes, direction in zip(two, ("training", "forward"), strict=True):
                axes.set_title(f"{direction}, {dtype}", loc="left", fontsize=10)
                _panel(axes, lines, dtype, direction)
            two[0].set_ylabel("time relative to\nattention without positions")
        for axes in panels[-1]:
            axes.set_xlabel("tokens")
        labels = {
            label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False)

    width, height = 600, 60 + 195 * len(dtypes)
    figure, png = Figure(figsize=(width / 72, height / 72), layout="constrained"), io.BytesIO()
    paint(figure)
    figure.savefig(png, format="png", dpi=144)
    return {"plot.png": png.getvalue(), "plot.svg": figures.printed(figures.draw(width, height, paint)).encode()}


def _panel(axes: Axes, lines: Mapping[str, Sequence[Row]], dtype: str, direction: str) -> None:
    """Draw medians over lengths, with the range of the rounds."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.axhline(1, color="black", linewidth=1, label="no positions")
    axes.update_datalim([(1, 0.99), (1, 1.01)], updatex=False)  # where all ratios are 1
    for index, (label, rows) in enumerate(lines.items()):
        here = sorted((row for row in rows if (row.dtype, row.direction) == (dtype, direction)), key=lambda row: row.n)
        if here:
            columns = ("n", "ratio", "lowest", "highest")
            lengths, ratios, lowest, highest = (list(map(attrgetter(name), here)) for name in columns)
            color, style = f"C{index}", ":" if label == "dense bias" else "-"
            axes.plot(lengths, ratios, style, marker="os^DvP"[index], label=label, color=color)
            axes.vlines(lengths, lowest, highest, alpha=0.6, color=color)
    lengths = sorted({row.n for rows in lines.values() for row in rows})
    axes.set_xticks(lengths, map(str, lengths))
    axes.yaxis.set(major_locator=FixedLocator(TICKS), major_formatter=FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.minorticks_off()
    axes.margins(x=0.06, y=0.1)
