"""Show a benchmark: a table of times relative to attention without positions, and a plot over sequence length."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from ...kernels.choose import BACKENDS
from ...lab.report import figures
from ...lab.sheet import Column, Sheet
from .cases import KINDS
from .results import BenchRow
from .ways import DENSE, FLOOR

INK, MUTED = (figures.PRINTED[color] for color in (figures.INK, figures.MUTED))
LOOKS = dict(
    zip(
        KINDS,
        zip(
            ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d31") * 2
            + ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31"),
            ("-",) * 6 + ("--",) * 6 + (":",) * 6,
            "os^DvPX*ph<>d8H.+x",
            strict=True,
        ),
        strict=True,
    )
)
"""Color, line and marker of each kind, always the same. Nothing depends on hue alone."""

LABELS = {"factors": "factors (TUPE)", "funnel": "bias, funnel", "padded": "bias, padded", "causal": "bias, causal"}
"""Legend labels of kinds whose name alone says too little."""

WIDTH = 800
"""Width of the plot in pixels."""

TICKS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_STYLE = figures.PRINT | {
    "axes.facecolor": "white",
    "axes.labelsize": "medium",
    "font.size": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "lines.solid_capstyle": "projecting",
}


READABLE = 5
"""The most kinds of terms whose lines can be told apart in a plot."""
FOREMOST = ("bias", "t5", "shaw", "padded")
"""The kinds that are drawn if there are more."""


def sheet(rows: Sequence[BenchRow]) -> Sheet:
    """Return a table with a line for each case and way, and the reasons for missing numbers below."""
    several = len({row.dtype for row in rows}) > 1
    found: dict[tuple[str, str, int, str], dict[str, BenchRow]] = {}
    for row in rows:
        found.setdefault((row.dtype, row.terms, row.n, row.way), {})[row.direction] = row
    reasons: dict[str, int] = {}
    lines = []
    for (dtype, kind, n, way), both in found.items():
        times = [_time(both.get(direction), reasons) for direction in ("forward", "training")]
        training = both.get("training")
        memory = "-" if training is None or training.memory is None else _mebibytes(training.memory)
        lines.append([kind, *([dtype] if several else []), str(n), way, *times, memory])
    words = [Column("terms", left=True), *([Column("dtype", left=True)] if several else [])]
    return Sheet.of(
        "Time relative to torch's attention without positions",
        [*words, "n", Column("way", left=True), "forward", "training", Column("training", "MiB")],
        lines,
        notes=(
            *(f"[{number}] {reason}" for reason, number in reasons.items()),
            "Medians of the rounds' ratios (lowest-highest). sdpa is torch's attention without positions. MiB is what "
            "a call needs beyond its inputs.",
        ),
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 10 * 2**20 else f"{size / 2**20:,.0f}"


def _time(row: BenchRow | None, reasons: dict[str, int]) -> str:
    """Format a cell: the time of plain attention, the ratio of another way, or the number of a reason."""
    if row is None:
        return "-"
    if row.milliseconds is None:
        return f"cannot [{reasons.setdefault(row.note, len(reasons) + 1)}]"
    if row.way == FLOOR.name:
        return f"{row.milliseconds:.3g} ms" if row.milliseconds < 1000 else f"{row.milliseconds:.0f} ms"
    return f"{row.ratio:.2f} ({row.lowest:.2f}-{row.highest:.2f})"


def headline(rows: Sequence[BenchRow]) -> str:
    """Return what positions cost in training, and what they cost as a dense bias, in a sentence."""
    trained = [row for row in rows if row.direction == "training"]
    costs = {name: sorted(row.ratio for row in trained if row.ratio and row.way == name) for name in _shown(rows)}
    parts = [
        f"{name} {found[0]:.2f}" + (f" to {found[-1]:.2f}" if f"{found[0]:.2f}" != f"{found[-1]:.2f}" else "")
        for name, found in costs.items()
        if found
    ]
    if not parts:
        return "No training with positions could be timed."
    return f"Training takes this multiple of the time of attention without positions: {', '.join(parts)}."


def _shown(rows: Sequence[BenchRow]) -> tuple[str, str]:
    """Return the backend to show, and the way to show beside it."""
    measured = {row.way for row in rows}
    return next((name for name in BACKENDS if name in measured), "auto"), DENSE.name


def plot(rows: Sequence[BenchRow]) -> str | None:
    """Draw a backend next to a dense bias, which is what most code does today; return None if nothing was timed.

    If more kinds of terms were measured than a plot can show, only the most important are drawn.

    Args:
        rows: the measurements. "auto" is drawn if it was measured, and another backend if not.

    Returns:
        An SVG, about 800 pixels wide, on white. The same rows give the same text.
    """
    backend, dense = _shown(rows)
    timed = [row for row in rows if row.ratio is not None]
    drawn = [row for row in timed if row.way == backend]
    if len({row.terms for row in drawn}) > READABLE:
        drawn = [row for row in drawn if row.terms in FOREMOST]
    dtypes = sorted({row.dtype for row in drawn}, reverse=True)
    if not drawn:
        return None
    lengths = sorted({row.n for row in drawn})
    today = [row for row in timed if row.way == dense and row.terms == "bias"]
    file = io.StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(WIDTH / 96, (80 + 260 * len(dtypes)) / 96))
        panels = figure.subplots(len(dtypes), 2, sharex=True, sharey="row", squeeze=False)
        for line, dtype in zip(panels, dtypes, strict=True):
            for axes, direction in zip(line, ("training", "forward"), strict=True):
                title = f"{direction}, {dtype}" if len(dtypes) > 1 else direction
                here = [
                    [row for row in group if (row.dtype, row.direction) == (dtype, direction)]
                    for group in (drawn, today)
                ]
                _panel(axes, here[0], here[1], lengths)
                axes.set_title(title, loc="left", fontsize=10, color=INK)
            line[0].set_ylabel("time relative to\nattention without positions")
        for axes in panels[-1]:
            axes.set_xlabel("tokens")
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)), frameon=False
        )
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "\n".join(text.rstrip() for text in file.getvalue().splitlines()) + "\n"


def _panel(axes: Axes, drawn: Sequence[BenchRow], today: Sequence[BenchRow], lengths: Sequence[int]) -> None:
    """Draw one direction and dtype; ``lengths`` are those of all panels, which share their axis."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.axhline(1, color=INK, linewidth=1, label="no positions")
    # So that the axis has a length where all ratios are 1.
    axes.update_datalim([(1, 0.99), (1, 1.01)], updatex=False)
    _line(axes, today, label="today: dense bias", marker=".", color=MUTED, linestyle=(0, (1, 1.5)))
    for kind in KINDS:
        color, line, marker = LOOKS[kind]
        _line(
            axes,
            [r for r in drawn if r.terms == kind],
            label=LABELS.get(kind, kind),
            color=color,
            linestyle=line,
            marker=marker,
        )
    axes.xaxis.set(major_locator=FixedLocator(lengths), minor_locator=NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:.0f}"))
    axes.yaxis.set(major_locator=FixedLocator(TICKS), minor_locator=NullLocator())
    axes.yaxis.set(major_formatter=FuncFormatter(lambda ratio, _: f"{ratio:g}"), minor_formatter=NullFormatter())
    axes.margins(x=0.06, y=0.1)


def _line(axes: Axes, rows: Sequence[BenchRow], **look: Any) -> None:
    """Draw medians over lengths, with the range of the rounds."""
    points = sorted(
        (row.n, row.ratio, row.lowest, row.highest)
        for row in rows
        if row.ratio is not None and row.lowest is not None and row.highest is not None
    )
    if points:
        lengths, medians, low, high = zip(*points, strict=True)
        axes.plot(lengths, medians, **look)
        axes.vlines(lengths, low, high, color=look["color"], linewidth=1, alpha=0.6)
