"""Draw heads as a grid of small panels that open large, each with a curve over offsets.

A curve's path has its own units (half a token across, a thousandth of its range up). It is stored once, and every
picture of it (small, large, near or whole) is a view onto that path, so a page with hundreds of heads stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from ..sheet import plain, signed
from . import page
from .figures import Series
from .heatmaps import Heatmap, round_values

Floats = NDArray[np.float64]

SMALL, NEAR = 32, 16
"""Offsets on each side that a small panel shows, and that the close-up in a large picture shows."""
BINS = 64
"""Points on each side beyond ``SMALL``; each is the mean of several offsets."""
ACROSS, DOWN = 2, 1000
"""Path units per offset, and per curve's whole range."""


@dataclass(frozen=True)
class Range:
    """The values at the bottom and the top of a plot."""

    low: float
    high: float

    @classmethod
    def of(cls, *values: ArrayLike) -> Range:
        """Return the range of all these values and 0."""
        every = [0.0, *(float(end) for part in values for end in (np.min(part), np.max(part)))]
        return cls(min(every), max(every))

    def at_least(self, span: float) -> Range:
        """Return the range, with its top raised if it spans less than ``span``."""
        return Range(self.low, max(self.high, self.low + span))

    @property
    def span(self) -> float:
        """The distance from bottom to top; 1 if both are equal."""
        return (self.high - self.low) or 1.0

    def ticks(self) -> dict[float, str]:
        """Return round values to mark, with their text."""
        return {tick: plain(tick) for tick in round_values(self.low, self.high)}


@dataclass(frozen=True)
class Plot:
    """A view onto a curve's paths.

    Args:
        view: an SVG viewBox.
        grid, zero: path data of the lines at ticks, and of those at 0.
        across, up: horizontal and vertical ticks: percent from the left or the top, and text.
        label: what it shows, for readers who can't see it.
    """

    view: str
    grid: str
    zero: str
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    label: str


@dataclass(frozen=True)
class Curve:
    """The path data of one head's curve, and views onto it.

    Args:
        line: the curve.
        area: its spread, or the area between it and 0.
        dots: a dot at each offset near 0.
        others: path data of lines to compare it with.
        small: the view in the panel.
        large: the views in the large picture.
    """

    line: str
    area: str
    dots: str
    others: tuple[str, ...]
    small: Plot
    large: tuple[Plot, ...]


@dataclass(frozen=True)
class Panel:
    """The panel of one head.

    Args:
        head: the head, such as "head 3".
        look: the head's color; a legend entry with this look hides and shows the head.
        name: what kind of head it is, or "".
        details: numbers about it, as text.
        curve: its curve over offsets.
        unit: the unit of the curve.
        maps: heatmaps with their captions; the panel also shows the first.
        more: further content of the large picture.
    """

    head: str
    look: Series
    name: str
    details: tuple[str, ...]
    curve: Curve
    unit: str
    maps: tuple[tuple[str, Heatmap], ...] = ()
    more: Markup = field(default_factory=Markup)


@dataclass(frozen=True)
class Row:
    """The heads of a layer, with a label and a note."""

    label: str
    note: str
    panels: tuple[Panel, ...]


def grid(rows: Sequence[Row], name: str, label: str, legend: Mapping[str, tuple[Series, int]] | None = None) -> Markup:
    """Render the heads as an element of a page.

    Args:
        rows: the heads of each layer.
        name: a name that is unique on the page; ids begin with it.
        label: what the grid shows.
        legend: the look and the number of each kind of head, if readers can hide and show kinds.
    """
    return Markup(page.render(page.TEMPLATES / "heads.html.j2", rows=rows, name=name, label=label, legend=legend))


def draw(
    offsets: ArrayLike,
    values: ArrayLike,
    shared: Range,
    *,
    label: str,
    spread: ArrayLike | None = None,
    others: Sequence[ArrayLike] = (),
    ticks: dict[float, str] | None = None,
) -> Curve:
    """Draw a curve over offsets.

    Args:
        offsets: (m,), ascending, without gaps.
        values: (m,), finite.
        shared: the range of the small panel.
        label: what the curve shows.
        spread: (m,), drawn above and below the curve.
        others: (m,) each, lines to compare it with.
        ticks: heights to mark, with their text; by default round values.
    """
    where = np.asarray(offsets, dtype=np.float64)
    across, middle = _sampled(where, where), _sampled(where, values)
    lines = [_sampled(where, line) for line in others]
    half = 0 * middle if spread is None else _sampled(where, spread)
    bottom, top = middle - half, middle + half
    own = Range.of(bottom, top, *lines)
    # For a curve that is flat next to others, units need not be finer than a line is thick.
    unit = max(own.span, shared.span / 50) / DOWN
    line = _path(across, -middle / unit)
    edges = (0 * middle, middle) if spread is None else (bottom, top)
    under, over = (_path(across[::step], -edge[::step] / unit) for step, edge in zip((-1, 1), edges, strict=True))
    near = np.abs(across) <= NEAR
    dots = zip(across[near, None], -middle[near, None] / unit, strict=True)
    reach = int(max(-where[0], where[-1]))
    views = [min(NEAR, reach), reach] if reach > NEAR else [reach]
    marks = own.ticks() if ticks is None else {tick: ticks[tick] for tick in ticks if own.low <= tick <= own.high}
    return Curve(
        line=line,
        area=f"{over}L{under[1:]}z",
        dots="".join(_path(*dot) for dot in dots),
        others=tuple(_path(across, -line / unit) for line in lines),
        small=_view(min(SMALL, reach), shared, unit, {}, label),
        large=tuple(
            _view(view, own, unit, marks, f"{label}, offsets {signed(-view)} to {signed(view)}") for view in views
        ),
    )


def _sampled(offsets: Floats, values: ArrayLike) -> Floats:
    """Return every value near 0, and beyond that the means of bins."""
    farthest = np.abs(offsets).max() - SMALL
    size = max(1, int(-(-farthest // BINS)))
    beyond = np.ceil((np.abs(offsets) - SMALL).clip(min=0) / size) * size
    key = np.sign(offsets) * (np.minimum(np.abs(offsets), SMALL) + beyond)
    starts = np.flatnonzero(np.r_[True, np.diff(key) != 0])
    counts = np.diff(np.r_[starts, len(key)])
    return np.asarray(np.add.reduceat(np.asarray(values, dtype=np.float64), starts) / counts)


def _path(across: Floats, down: Floats) -> str:
    """Return the path data of a line: its first point, then steps, without spaces before minus signs."""
    points = np.rint(np.stack((ACROSS * across, down), 1)).astype(int)
    (x, y), steps = points[0], np.diff(points, axis=0).flatten()
    return f"M{x} {y}" + (f"l{' '.join(map(str, steps))}".replace(" -", "-") if len(steps) else "h0")


def _view(reach: int, heights: Range, unit: float, ticks: dict[float, str], label: str) -> Plot:
    """Make a view of offsets -reach to reach and a range of heights, with a little room around them."""
    room = 0.06 * heights.span / unit
    left, width = -ACROSS * max(reach, 1) * 1.02, 2 * ACROSS * max(reach, 1) * 1.02
    top, height = -heights.high / unit - room, heights.span / unit + 2 * room
    marks = MaxNLocator(4, integer=True, steps=[1, 2, 2.5, 4, 5, 8, 10]).tick_values(-reach, reach) if reach else [0]
    across = [int(mark) for mark in marks if -reach <= mark <= reach]
    vertical = [f"M{ACROSS * mark} {top:.0f}v{height:.0f}" for mark in across] if ticks else []
    horizontal = [f"M{left:.0f} {-tick / unit:.0f}h{width:.0f}" for tick in ticks]
    return Plot(
        view=f"{left:.1f} {top:.0f} {width:.1f} {max(height, 1):.0f}",
        grid="".join(vertical + horizontal),
        zero=f"M{left:.0f} 0h{width:.0f}M0 {top:.0f}v{height:.0f}",
        across=tuple((round(100 * (ACROSS * mark - left) / width, 1), signed(mark)) for mark in across),
        up=tuple((round(100 * (-tick / unit - top) / height, 1), text) for tick, text in ticks.items()),
        label=label,
    )
