from collections.abc import Iterator

import pytest

NOUNS = ["cat", "dog", "bird", "fish", "child", "baker", "king", "queen", "farmer", "horse"]
SENTENCES = ["the {a} saw the {b} near the old house.", "a {b} and a {a} went to the market.", "where is the {a}?"]


DRAWN = {}


@pytest.fixture(scope="module", autouse=True)
def _figures_are_drawn_once(request) -> Iterator[None]:
    """Every report paints its figures, but only the first of a size becomes SVG; tests of pages have all."""
    if request.module.__name__.endswith("_report"):
        yield
        return
    from matplotlib.figure import Figure

    from whereformer.lab.report import figures

    draw = figures.draw

    def draw_once(width, height, paint):
        size = width, height
        if size in DRAWN:
            paint(Figure())
        else:
            DRAWN[size] = draw(*size, paint)
        return DRAWN[size]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(figures, "draw", draw_once)
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The path of a story that a tiny model learns in seconds."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    lines = [s.format(a=a, b=b) for a in NOUNS for b in NOUNS for s in SENTENCES]
    path.write_text("\n".join(lines * 3))
    return str(path)
