"""Matplotlib's figures as elements of a page."""

from xml.etree import ElementTree

from whereformer.lab.report import figures


def test_a_figure_on_a_page_is_whole():
    def paint(figure):
        axes = figure.add_subplot()
        for number, look in enumerate(figures.series(2)):
            axes.plot([0, 1, 2.3456], [1, 2 + number, 3], **look.line)
        axes.set(xlabel="step")

    svg = ElementTree.fromstring(figures.inline(figures.draw(300, 200, paint), "name", "what it shows"))
    assert (svg.tag, svg.get("aria-label")) == ("svg", "what it shows")
    lines = [path for path in svg.iter("path") if "var(--hue-" in path.get("style", "")]
    assert len(lines) == 2
    assert all(path.get("d", "").startswith("M ") and path.get("d").count(" L ") == 2 for path in lines)
    assert "step" in [text.text for text in svg.iter("text")]
    ids = {part.get("id") for part in svg.iter() if part.get("id")}
    assert {path.get("clip-path") for path in lines} <= {f"url(#{each})" for each in ids}


def test_series_are_never_told_apart_by_hue_alone():
    looks = figures.series(16, plain=3)
    assert looks[3].css == "currentColor"
    assert len({(look.css, look.dash) for look in looks}) == 16
