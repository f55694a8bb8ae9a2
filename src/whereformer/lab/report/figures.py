"""Draw Matplotlib figures as SVG for a page, in the page's font and colors (light or dark), or save them as files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path

from markupsafe import Markup
from matplotlib import style
from matplotlib.figure import Figure

# Matplotlib needs fixed colors, but the page needs CSS variables, which depend on dark or light mode. So drawings use
# colors that nothing else uses (the file of their style too), and the SVG gets the variables in their place.
STYLE = Path(__file__).parent / "templates" / "page.mplstyle"
INK, MUTED, GRID = "#000001", "#000002", "#000003"
HUES = tuple(f"#0000a{index}" for index in range(6))
_CSS = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    **{hue: f"var(--hue-{index})" for index, hue in enumerate(HUES)},
}
PRINTED = {
    INK: "#1f2328",
    MUTED: "#59636e",
    GRID: "#d8dee4",
    **dict(zip(HUES, ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"), strict=True)),
}
"""The page's light colors, for figures that are saved as files."""


def legend(figure: Figure) -> None:
    """Name the lines of a figure below its axes, where narrow screens show them; the figure gets as much higher."""
    names = [name for axes in figure.axes for name in axes.get_legend_handles_labels()[1]]
    columns = max(1, int(72 * figure.get_figwidth() / (50 + 6.5 * max(map(len, names)))))
    figure.set_figheight(figure.get_figheight() + 17 / 72 * math.ceil(len(names) / columns))
    figure.legend(loc="outside lower left", ncols=columns)


def draw(width: int, height: int, paint: Callable[[Figure], None]) -> str:
    """Let ``paint`` fill an empty figure, and return it as an SVG file, in the colors that stand for others.

    At ``width`` and ``height`` in CSS pixels, the figure's text is as large as a page's. A legend adds to the height.
    """
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(width / 72, height / 72))
        paint(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def printed(svg: str) -> str:
    """Return a drawing as a separate file, in the page's light colors, on a transparent background."""
    return re.sub(r"#0000\w\w", lambda color: PRINTED.get(color[0], color[0]), svg)


def inline(svg: str, name: str, label: str) -> Markup:
    """Return a drawing as an element of a page, with the page's font and colors, that scales with it.

    Args:
        svg: the drawing.
        name: a name that is unique on the page; ids begin with it.
        label: a description of the figure, for readers who can't see it.
    """
    _, _, width, height = re.findall(r'viewBox="(.*?)"', svg)[0].split()
    inside = svg[svg.index(">", svg.index("<svg")) + 1 :]
    for pattern, new in (
        ("<metadata>.*?</metadata>|<style.*?</style>", ""),
        (' id="image[^"]*"', ""),  # the same for equal images
        (r'( id="|url[(]#|href="#)', rf"\1{name}-"),
        ("xlink:href", "href"),
        ('font-family: [^;"]*;? ?', ""),
        (r"#0000\w\w", lambda color: _CSS.get(color[0], color[0])),
    ):
        inside = re.sub(pattern, new, inside, flags=re.DOTALL)
    frame = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" style="--width: {:g}px">'
    return Markup(frame).format(width, height, label, float(width)) + Markup(inside.strip())
