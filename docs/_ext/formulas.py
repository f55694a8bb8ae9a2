"""Formulas as SVG, drawn by Matplotlib: pages need no script, no font and no network, and look the same everywhere."""

from html import escape

from docutils import nodes
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath

SIZE = 10
"""The number of drawing units in one em of the page."""

COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}


def svg(tex, kind):
    """The drawing of a formula, aligned with the baseline of the text around it."""
    path = TextPath((0, 0), f"${' '.join(tex.split())}$", size=SIZE, prop=FontProperties(math_fontfamily="cm"))
    parts = []
    for vertices, code in path.iter_segments(simplify=False, curves=True):
        points = " ".join(f"{number:.2f}" for number in ([] if code == Path.CLOSEPOLY else vertices))
        parts.append(COMMANDS[code] + points)
    (left, bottom), (right, top) = path.get_extents().get_points()
    width, height = right - left, top - bottom
    style = f"width:{width / SIZE:.3f}em;height:{height / SIZE:.3f}em;vertical-align:{bottom / SIZE:.3f}em"
    return (
        f'<svg class="formula-{kind}" role="img" aria-label="{escape(tex.strip())}" style="{style}" '
        f'viewBox="{left:.2f} {-top:.2f} {width:.2f} {height:.2f}">'
        f'<path transform="scale(1 -1)" d="{"".join(parts)}"/></svg>'
    )


def _inline(translator, node):
    translator.body.append(svg(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(translator, node):
    # A line of a formula ends with "\\\\".
    lines = (svg(line, "line") for line in node.astext().split(r"\\") if line.strip())
    translator.body.append(f'<div class="formula">{"".join(lines)}</div>')
    raise nodes.SkipNode


def setup(app):
    """Register the renderer that ``html_math_renderer`` names."""
    app.add_html_math_renderer("svg", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
