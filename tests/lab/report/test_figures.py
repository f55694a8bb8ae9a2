"""Matplotlib's figures as elements of a page."""

from xml.etree import ElementTree

from matplotlib.figure import Figure

from whereformer.lab.report import figures, score_report


def test_a_figure_on_a_page_is_whole():
    def paint(figure):
        axes = figure.add_subplot()
        for number in range(2):
            axes.plot([0, 1, 2.3456], [1, 2 + number, 3])
        axes.set(xlabel="step")

    svg = ElementTree.fromstring(figures.inline(figures.draw(300, 200, paint), "name", "what it shows"))
    assert (svg.tag, svg.get("aria-label")) == ("svg", "what it shows")
    lines = [path for path in svg.iter("path") if "var(--hue-" in path.get("style", "")]
    assert len(lines) == 2
    assert all(path.get("d", "").split().count("L") == 2 for path in lines)
    assert "step" in [text.text for text in svg.iter("text")]
    ids = {part.get("id") for part in svg.iter() if part.get("id")}
    assert {path.get("clip-path") for path in lines} <= {f"url(#{name})" for name in ids}


def test_a_legend_is_below_the_axes_and_within_the_figure():
    """Of 36 names, too, for which the figure is higher."""
    heights = []
    for count in (2, 36):
        curves = {f"transformer_xl+{number}": [(1, 2.0), (2, 1.0 + number)] for number in range(count)}
        canvas = Figure(figsize=(420 / 72, 300 / 72), layout="constrained")
        score_report.paint_over_steps(curves)(canvas)
        canvas.draw_without_rendering()
        axes, legend = canvas.axes[0].get_window_extent(), canvas.legends[0].get_window_extent()
        assert legend.y1 <= axes.y0
        assert 0 <= legend.x0 < legend.x1 <= canvas.bbox.width
        assert legend.y0 >= 0
        heights.append(axes.height)
    assert heights[1] > 0.8 * heights[0]
