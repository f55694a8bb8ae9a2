"""The analysis' page and pictures, from findings that are made up."""

import csv
import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.report.findings import model_of
from tests.lab.report.pages import Page
from whereformer.recipes.head_report import build_look, build_report, downsample, find_limits


def page_of(*models):
    return build_report(models).page()


def check(text):
    page = Page(text)
    page.check_self_contained()
    page.check_references()
    without_images = re.sub(r"base64,[^\"]*", "", text)
    assert not re.search(r"\b(nan|inf|None|tensor)\b", without_images)
    return page


def test_a_whole_model():
    text = page_of(model_of())
    page = check(text)
    assert re.search(r"<h1>Position tells \d of 6 heads where to look \(2 previous token, 1 next", text)
    assert re.search(r"\); the position embeddings have a Toeplitzness of 0\.\d\d \(1: only", text)
    assert "What did tiny-bert learn about position?" in text
    assert len(re.findall(">head [0-9]+: ", text)) == 6
    assert len([row for row in page.cells if row[2:3] == ["previous token"]]) == 2
    assert text.count('data-order="0.98"') == 6  # of S=5
    assert text.count("norms, projections, biases") == 1
    assert "near: up to 8 tokens away), or position-blind if its range is below 0.25" in text
    assert page_of(model_of()) == text


def test_without_what_a_model_lacks():
    check(page_of(model_of(table=False)))
    text = page_of(model_of(head_layers=0))
    check(text)
    assert "head by head" not in text
    text = page_of(model_of(head_layers=0, table=False))
    assert "<h1>Position has no effect of its own.</h1>" in text
    text = page_of(model_of(table=False, scores=False, position="tisa"))
    check(text)
    assert "data:image/png" not in text
    assert "Top: the same at every offset." in text


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("scores", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_few_positions_and_one_head(n, scores):
    text = page_of(model_of(n=n, scores=scores, layers=1, heads=1))
    check(text)
    assert ("<h1>Position tells 1 of 1 head" if n > 1 else "<h1>Position tells 0 of 1 head") in text


def test_several_models(tmp_path):
    models = [model_of(f"model <{i}>", n=16, noise=1.0 - i / 4, heads=2) for i in range(3)]
    text = page_of(*models)
    page = check(text)
    assert re.search(
        r"<h1>The position embeddings of model &lt;2&gt; depend most on distance alone \(Toeplitzness 0", text
    )
    assert text.index("<table") < text.index("<summary")
    assert [row[:2] for row in page.cells[:3]] == [[f"model <{i}>", "learned"] for i in range(3)]
    assert text.count("What position adds, head by head</summary>") == 3
    models = [model_of(name, n=16, noise=i) for i, name in enumerate(("a/b", "a_c"))]
    paths = build_report(models).write(tmp_path)
    parts = "position-embeddings", "what-position-adds-head-by-head"
    pictures = {f"{model}-{what}" for model in ("a-b", "a-c") for what in parts}
    tables = {
        f"{name}.csv" for m in ("a-b", "a-c") for name in ("position", f"heads-of-{m}", f"kernels-of-{m}-in-numbers")
    }
    assert {path.name for path in paths} == {
        "report.html",
        "report.md",
        "position.csv",
        *tables,
        *(f"{name}.svg" for name in pictures),
    }
    for name in pictures:
        assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")
        assert f"]({name}.svg)" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("peak", "height", "name"),
    [
        (-1, 1, "previous token"),
        (0, 1, "around itself"),
        (1, 1, "next token"),
        (-8, 1, "near"),
        (9, 1, "far"),
        (3, 0.2, "position-blind"),
    ],
)
def test_a_head_is_named_by_the_place_where_its_curve_is_highest(peak, height, name):
    head = model_of(layers=1, heads=1).heads[0]
    assert dataclasses.replace(head, curve=height * (head.offsets == peak).double()).name == name


def test_the_numbers_of_kernels_can_be_copied(tmp_path):
    build_report([model_of(layers=1, heads=1)]).write(tmp_path)
    text = (tmp_path / "kernels-of-tiny-bert-in-numbers.csv").read_text(encoding="utf-8")
    _, *rows = csv.reader(text.splitlines())
    assert [row[:5] for row in rows[:2]] == [["0", "0", "1", "2", "1"], ["0", "0", "2", "2, 0.2", "1, 0.05"]]


def test_a_sentence_has_what_each_head_adds_to_each_pair():
    model = model_of(n=16, layers=1, heads=2, scores=False)
    look = build_look(model)
    assert look["tokens"] == list(model.tokens)
    (name, scores), _ = look["heads"]
    assert name == "layer 0, head 0 (previous token)"
    curve = dict(zip(model.heads[0].offsets.tolist(), model.heads[0].curve.tolist(), strict=True))
    assert scores == [[pytest.approx(curve[key - query], abs=0.005) for key in range(4)] for query in range(4)]
    text = page_of(model)
    assert "&lt;sat&gt;" not in text  # in JSON, escaped for JSON
    assert r"\u003csat\u003e" in text
    pooled = dataclasses.replace(model.heads[0], offsets=2 * model.heads[0].offsets)
    assert build_look(dataclasses.replace(model, heads=(pooled,))) is None


def test_scores_are_drawn_over_toeplitzness():
    models = [dataclasses.replace(model_of(f"m{i}", n=16, noise=i + 0.5), score=80.5 - i) for i in range(3)]
    report = build_report(models)
    (figure,) = [section for section in report.sections if section.title == "Score over Toeplitzness"]
    assert float(figure.caption.split()[-1][:-1]) > 0.5
    assert [cell.text for cell in report.sections[0].rows[0]][-1] == "80.5"


@pytest.mark.slow
def test_twelve_layers_of_twelve_heads_stay_below_five_megabytes():
    assert len(page_of(model_of(n=512, layers=12, heads=12, noise=1.0)).encode()) < 5_000_000


def test_the_old_page_survives_a_failure(tmp_path):
    build_report([model_of(n=8)]).write(tmp_path)
    old = (tmp_path / "report.html").read_bytes()
    broken = dataclasses.replace(model_of(n=8), table=dataclasses.replace(model_of(n=8).table, gram=None))
    with pytest.raises(TypeError):
        build_report([broken]).write(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == old


@given(n=st.integers(1, 40), pixels=st.integers(1, 40))
def test_averaging_keeps_constants_and_bounds(n, pixels):
    matrix = torch.arange(n * n, dtype=torch.float64).reshape(n, n)
    small = downsample(matrix, pixels)
    assert max(small.shape) <= pixels
    assert small.min() >= 0
    assert small.max() <= n * n - 1
    assert np.allclose(downsample(torch.full((n, n), 7.0), pixels), 7.0)


def test_blocks_at_the_end_are_averaged_over_what_they_have():
    matrix = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert downsample(matrix, 2).tolist() == [[3.0, 4.5], [7.5, 9.0]]


def test_equal_values_have_a_scale_around_them():
    assert find_limits(np.full((2, 2), 3.0)) == (2.5, 3.5)
    assert find_limits(np.full((2, 2), 3.0), center=3.0) == (2.5, 3.5)
