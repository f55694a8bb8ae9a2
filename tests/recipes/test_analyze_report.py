"""The analysis' page and pictures, from findings that are made up."""

import dataclasses
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.report.findings import model_of
from tests.lab.report.pages import Page
from whereformer.analysis.fit import TisaFit
from whereformer.lab.terminal import Terminal
from whereformer.recipes.analyze_report import averaged, kernels_of, limits, peak, related, report_of, verdict

ADDS, LOOK = "what-position-adds-head-by-head", "where-the-heads-look-in-text"


def page_of(models):
    return report_of(models, []).page()


def heads_in(text):
    """How many panels of heads have been drawn."""
    return len(re.findall(">head [0-9]+: ", text))


def check(text):
    page = Page(text)
    page.check_self_contained()
    page.check_references()
    without_images = re.sub(r"base64,[^\"]*", "", text)
    assert not re.search(r"\b(nan|inf|None|tensor)\b", without_images)
    return page


@pytest.fixture(scope="module")
def text():
    return page_of([model_of()])


def test_a_whole_model(text):
    page = check(text)
    assert re.search(r"<h1>Position tells \d of 6 heads where to look \(2 previous token, 1 next", text)
    assert re.search(r"\); the position embeddings have a Toeplitzness of 0\.\d\d, where 1 means", text)
    assert "What did tiny-bert learn about position?" in text
    # A head of each grid: what position adds, and where it looks in text.
    assert heads_in(text) == 6 + 6
    assert len([row for row in page.cells if row[2:3] == ["previous token"]]) == 2
    assert text.count('data-order="0.98" title="') == 6  # of S=5, with its kernels
    assert text.count('title="its curve peaks at offset') == 6
    assert text.count("norms, projections, biases") == 1
    rules = {row[0]: row[1] for row in page.cells if len(row) == 2}
    assert rules["position-blind"].startswith("scores by position alone hardly differ")


def test_the_table_of_heads_fits_into_a_narrow_terminal():
    """With every kind of head and what was measured in text; tables that do not fit repeat their first column."""
    console = Terminal(width=80, file=io.StringIO())
    console.print(report_of([model_of()], []))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (header,) = [line for line in lines if line.split()[:2] == ["layer", "head"]]
    assert header.split()[-1] == "measured"


def test_equal_findings_give_equal_pages(text):
    assert page_of([model_of()]) == text


def test_without_what_a_model_lacks():
    text = page_of([model_of(table=False, attention=False)])
    check(text)
    assert "Where the heads look" not in text
    text = page_of([model_of(head_layers=0, attention=False)])
    check(text)
    assert heads_in(text) == 0
    text = page_of([model_of(head_layers=0, attention=False, table=False)])
    assert "<h1>Nothing to see: position has no effect of its own.</h1>" in text


def test_curves_without_scores():
    text = page_of([model_of(table=False, scores=False, position="tisa")])
    check(text)
    assert "data:image/png" not in text
    assert "Above: that at any offset." in text


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("scores", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_few_positions(n, scores):
    check(page_of([model_of(n=n, scores=scores)]))


def test_one_head():
    text = page_of([model_of(layers=1, heads=1)])
    check(text)
    assert "<h1>Position tells 1 of 1 head where to look (1 previous token); " in text


def test_several_models_with_scores():
    models = [model_of(f"model <{i}>", n=16, score=70.0 + i, noise=1.0 - i / 4, heads=2) for i in range(3)]
    text = page_of(models)
    page = check(text)
    assert re.search(
        r"<h1>Distance alone counts the most for the position embeddings of model &lt;2&gt; \(Toeplitzness 0", text
    )
    assert page.cells[0][0] == "model <0>"
    assert text.index("<figure>") < text.index("<table>") < text.index("<summary")
    assert "Toeplitzness over training" not in text
    assert re.search(r"Scores and the Toeplitzness of position embeddings correlate by 0\.\d\d over 3 models\.", text)
    assert [row[:3] for row in page.cells[:3]] == [[f"model <{i}>", "learned", f"{70 + i}"] for i in range(3)]
    assert text.count("What position adds, head by head</summary>") == 3


def test_scores_are_related_to_heads_where_models_have_no_tables():
    models = [model_of(str(i), n=8, score=float(i), table=False, noise=0.1 + i) for i in range(3)]
    (sentence,) = related(models)
    assert re.search(r"the Toeplitzness of heads correlate by .0\.\d\d over 3 models", sentence)
    assert related(models[:2]) == []
    assert related([dataclasses.replace(model, score=1.0) for model in models]) == []
    tables = [model_of(str(i), n=8, score=float(i), table=i != 1, noise=0.1 + i) for i in range(4)]
    assert "of position embeddings correlate" in related(tables)[0]
    assert "over 3 models" in related(tables)[0]


def test_checkpoints_of_a_run():
    models = [model_of(f"step {i}", n=16, step=i, noise=1.0 - i / 2000, heads=2) for i in (1000, 0, 500)]
    text = page_of(models)
    check(text)
    assert re.search(r"<h1>Toeplitzness goes from 0\.\d\d at step 0 to 0\.\d\d at step 1,000\.</h1>", text)
    assert "Toeplitzness over training" in text
    same = [dataclasses.replace(models[0], step=step) for step in (0, 10)]
    assert re.fullmatch(r"Toeplitzness stays at 0\.\d\d from step 0 to step 10\.", verdict(same))


def test_names_of_heads_that_are_not_known_have_looks():
    model = model_of(attention=False)
    heads = tuple(dataclasses.replace(head, name=f"new kind {number}") for number, head in enumerate(model.heads))
    text = page_of([dataclasses.replace(model, heads=heads)])
    check(text)
    assert "6 of 6 heads where to look (1 new kind 0, 1 new kind 1" in text


def test_kernels_are_written_as_they_are():
    fit = TisaFit(
        *torch.tensor([[1.0, -2.0], [0.5, -1.0], [-1.0, 2.5]]).double(), torch.tensor(0.25), torch.tensor(0.9)
    )
    minus = "\N{MINUS SIGN}"
    assert kernels_of(fit) == f"{minus}2 at +2.5, b 1; +1 at {minus}1, b 0.5"


@pytest.mark.slow
def test_twelve_layers_of_twelve_heads_stay_below_five_megabytes():
    assert len(page_of([model_of(n=512, layers=12, heads=12, noise=1.0)]).encode()) < 5_000_000


def test_files(tmp_path):
    models = [model_of(name, n=16, score=float(i), step=i) for i, name in enumerate(("a/b", "a_c"))]
    paths = report_of(models, []).write(tmp_path)
    assert sorted(paths) == sorted(tmp_path.iterdir())
    drawn = {f"{model}-{what}" for model in ("a-b", "a-c") for what in ("position-embeddings", ADDS, LOOK)}
    drawn.add("toeplitzness-over-training")
    assert {path.name for path in paths} == {"report.html", "report.md", *(f"{name}.svg" for name in drawn)}
    for name in drawn:
        assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")
        assert f"]({name}.svg)" in (tmp_path / "report.md").read_text()


def test_the_old_page_survives_a_failure(tmp_path):
    report_of([model_of(n=8)], []).write(tmp_path)
    old = (tmp_path / "report.html").read_bytes()
    broken = dataclasses.replace(model_of(n=8), table=dataclasses.replace(model_of(n=8).table, gram=None))
    with pytest.raises(TypeError):
        report_of([broken], []).write(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == old


def test_peaks_of_attention_are_named():
    assert peak([-2, -1, 0, 1, 2], [0.1, 0.6, 0.1, 0.1, 0.1]) == "\N{MINUS SIGN}1, 60%"
    assert peak([-2, -1, 0, 1, 2], [0.2] * 5) == "even"


@given(n=st.integers(1, 40), pixels=st.integers(1, 40))
def test_averaging_keeps_constants_and_bounds(n, pixels):
    matrix = torch.arange(n * n, dtype=torch.float64).reshape(n, n)
    small = averaged(matrix, pixels)
    assert max(small.shape) <= pixels
    assert small.min() >= 0
    assert small.max() <= n * n - 1
    assert np.allclose(averaged(torch.full((n, n), 7.0), pixels), 7.0)


def test_blocks_at_the_end_are_averaged_over_what_they_have():
    matrix = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert averaged(matrix, 2).tolist() == [[3.0, 4.5], [7.5, 9.0]]


def test_equal_values_have_a_scale_around_them():
    assert limits(np.full((2, 2), 3.0)) == (2.5, 3.5)
    assert limits(np.full((2, 2), 3.0), center=3.0) == (2.5, 3.5)
