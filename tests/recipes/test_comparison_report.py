"""The comparison's page, from small results that are made up here."""

import html
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.lab.report.pages import Page
from whereformer.cli.flags import parse
from whereformer.lab import examples
from whereformer.lab.examples import fill_blank, find_words
from whereformer.recipes.compare import Compare, RateSearch
from whereformer.recipes.comparison_report import ComparisonResult, build_examples

LENGTH = 16
CANNOT = "learned covers positions 0 to 15 (max_length 16), got position {}; raise max_length"
TO, ERROR = "\N{EN DASH}", "\N{PLUS-MINUS SIGN}"
ODD_NAME = 'my<b>&"own"'
LONG_NAMES = [
    *("deberta", "inkling", "shaw", "tisa", "rope/rope/rope/none", "sinusoidal/rope+logn/none", "learned+tisa"),
    *("learned+sinusoidal", "fox", "alibi", "none"),
]


def outcome(loss, seed=0, *, extrapolates=True, parameters=0, steps=60):
    """A model whose windows agree on its loss, so that any gap between two methods is a clear one."""
    longer = [[loss + 0.1 * factor, 0.2] if extrapolates else CANNOT.format(factor * LENGTH - 1) for factor in (2, 4)]
    scores = [[loss + 0.01 * seed, 0.25 - 0.01 * seed], *longer]
    losses = [loss + 2 * ((step + 1) / steps) ** -0.5 for step in range(steps)]
    return ComparisonResult(0.004, losses, scores, [loss + 0.01 * window for window in range(5)], parameters, 2 * 10**9)


METHODS = {
    "none": {"loss": 4.5},
    "tisa": {"loss": 4.0, "parameters": 1234},
    "learned": {"loss": 4.25, "extrapolates": False, "parameters": 5678},
    ODD_NAME: {"loss": 4.26},
}


def recipe_of(methods=METHODS, **options):
    return Compare(**{"out": "x", "positions": list(methods), "length": LENGTH, "steps": 60, **options})


def report_of(methods=METHODS, seeds=1, *, guessing=4.9876, rates=None, trials=None, jobs=1, **options):
    """A report on made-up outcomes: a dictionary of options of :func:`outcome` for each method."""
    recipe = recipe_of(methods, seeds=seeds, **options)
    outcomes = {
        (seed, name): of if isinstance(of, ComparisonResult) else outcome(seed=seed, **of)
        for seed in range(seeds)
        for name, of in methods.items()
    }
    material = SimpleNamespace(source="<i>news</i> & more.txt", guessing=guessing, held_out=None, tokenizer=None)
    return recipe.report(material, outcomes, rates or {}, range(seeds), trials or {}, 60.0, jobs)


def wide_report():
    """A wide table: many methods with long names, and ranges in most cells."""
    return report_of(
        {name: {"loss": 4 + i / 10, "parameters": 73_664, "steps": 200} for i, name in enumerate(LONG_NAMES)}, 3
    )


class Letters:
    """A tokenizer of words of a letter, repeated; a word in angles is a part of one."""

    def convert_ids_to_tokens(self, ids):
        return [f"##{chr(97 + number)}" if number > 25 else 2 * chr(97 + number) for number in ids]

    def decode(self, ids, **_):
        return " ".join(self.convert_ids_to_tokens(ids))


class Pieces:
    """A tokenizer of parts of words."""

    def decode(self, ids, **_):
        return " ".join(("play", "##ing", "now")[number] for number in ids).replace(" ##", "")


def test_a_part_of_a_word_is_not_an_example():
    ids = torch.tensor([0, 1, 2, 0])
    assert find_words(Pieces(), ids, ids, 4) == [2, 3]
    assert find_words(Pieces(), ids, ids, 3) == [2]


def test_the_text_around_a_word_has_whole_words_only(monkeypatch):
    monkeypatch.setattr(examples, "CONTEXT", 2)
    ids, labels = torch.tensor([0, 1, 2, 2, 0, 0, 1]), torch.tensor([-100, -100, -100, 2, -100, -100, -100])
    assert fill_blank(Pieces(), ids, labels, 0, [0]) == ("now ____ play", ["now", "play"])


def test_examples_are_words_that_methods_fill_in_and_where_they_differ():
    inputs = torch.arange(26).repeat(4)
    labels = torch.full_like(inputs, -100)
    labels[2::4] = inputs[2::4]
    targets = labels[2::4].tolist()
    wrong = [(number + 1) % 26 for number in targets]
    known = {"none": wrong, "tisa": targets, "rope": [*targets[:5], *wrong[5:]]}
    runs = {name: {0: replace(outcome(4.0), answers=answers), 1: outcome(4.0)} for name, answers in known.items()}
    held_out = SimpleNamespace(inputs=inputs, labels=labels)
    (sheet,) = build_examples(runs, ["tisa", "rope"], held_out, Letters(), causal=False)
    rows = [[cell.text for cell in row] for row in sheet.rows]
    assert rows[0] == ["bb ____ dd ee ff gg hh ii jj kk ll mm nn oo pp qq", "cc", "tisa and rope", "none: dd"]
    assert all("tisa" in right and "none" in wrong for _, _, right, wrong in rows)
    assert [word for _, word, *_ in rows] == ["cc", "ee", "gg", "ii"]
    assert [column.wraps for column in sheet.columns] == [True, False, False, False]
    (sheet,) = build_examples(runs, ["tisa", "rope"], held_out, Letters(), causal=True)
    assert [cell.text for cell in sheet.rows[0]][:2] == ["bb ____", "cc"]
    runs["rope"] = {0: outcome(4.0)}  # as from a record of an earlier version
    assert build_examples(runs, ["tisa", "rope"], held_out, Letters(), causal=False) == []


@pytest.fixture(scope="module")
def text():
    return report_of().page()


def test_the_page_needs_nothing_else_and_every_reference_leads_somewhere(text):
    Page(text).check_self_contained()
    Page(text).check_references()
    assert report_of().page() == text


def test_the_table_has_each_method_once_with_its_numbers(text):
    assert Page(text).cells[:4] == [
        ["1", "tisa", "4.000", "4.200", "4.400", "25.0%", "0.004", "2.00", "1,234"],
        ["2", "learned", "4.250", "n/a", "n/a", "25.0%", "0.004", "2.00", "5,678"],
        ["2", ODD_NAME, "4.260", "4.460", "4.660", "25.0%", "0.004", "2.00", "0"],
        ["4", "none", "4.500", "4.700", "4.900", "25.0%", "0.004", "2.00", "0"],
    ]
    assert text.count(f'title="{CANNOT.format(31)}"') == 1
    assert "<h1>Take tisa for now: it leads after 60 steps. learned and my" in text
    markdown = report_of().markdown()
    assert "| 1 | tisa | 4.000 |" in markdown
    assert "![Held-out loss over length](held-out-loss-over-length.svg)" in markdown


def test_several_seeds_give_medians_and_ranges():
    page = report_of(seeds=2).page()
    first = Page(page).cells[0]
    assert (first[2], first[5]) == (f"4.0054.00{TO}4.01", "24.5%")
    assert "seeds 0 and 1" in page


def test_the_best_methods_are_told_apart_by_longer_text():
    level = {"a": {"loss": 4.0}, "b": {"loss": 4.01, "extrapolates": False}, "none": {"loss": 4.9}}
    assert "4 times as many as in training, their losses are: a 4.400 and b n/a." in report_of(level).sentences[1]


def test_what_came_from_outside_is_escaped(text):
    assert "my<b>" not in text
    assert "<i>news" not in text
    assert "my&lt;b&gt;&amp;&#34;own&#34;" in text
    assert "&lt;i&gt;news&lt;/i&gt; &amp; more.txt" in text


def test_every_figure_is_labeled_and_takes_the_page_s_colors(text):
    drawings = [attributes for tag, attributes in Page(text).tags if tag == "svg" and "aria-hidden" not in attributes]
    labels = [attributes["aria-label"] for attributes in drawings]
    assert labels == ["Training loss over steps", "Held-out loss over length"]
    figures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert not [color for svg in figures for color in re.findall(r"#[0-9a-f]{6}\b(?![-\w])", svg)]
    assert "font-family" not in "".join(figures)
    assert len(text) < 500_000


def test_methods_that_failed_and_the_rates_that_were_tried_are_named():
    failed = ComparisonResult(0.1, [], [], [], 0, None, "the loss is not finite")
    trials = {("tisa",): RateSearch([5.25, None, 5.5], 60)}
    report = report_of({**METHODS, "t5": failed}, rates={"shaw": None}, trials=trials)
    page = report.page()
    assert "the loss was not finite (NaN or inf): shaw and t5." in page
    assert "0.004: 5.250, 0.008: not finite, 0.016: 5.500" in page
    assert "t5, seed 0: the loss is not finite" in report.problem
    assert "the loss of &#39;shaw&#39;" not in page
    assert report_of({"t5": failed}).sentences == ["No method has a result."]


def test_a_method_that_is_not_yet_learning_has_no_rank():
    page = report_of({**METHODS, "learned": {"loss": 4.52}}).page()
    cells = {row[1]: row for row in Page(page).cells}
    assert cells["learnednot learning"][0] == TO
    assert "learned is not learning yet: its loss is not clearly lower than that of none. Train longer" in page
    assert "(--steps 240)" in page


def test_the_next_command_runs_as_it_is_printed_and_in_a_new_folder():
    report = report_of(out=Path("runs/a b-quick"), quick=True, causal=True)
    assert report.sentences[0].startswith("First look. Take tisa for now")
    assert report.advice == "To see who stays ahead (about 4 more minutes)"
    assert report_of(jobs=8).advice == "To see who stays ahead (about 1 more minute)"
    assert report_of(jobs=8, ray="auto").advice.endswith("(about 4 more minutes with one job at a time)")
    program, command, *words = shlex.split(report.next_command)
    assert (program, command) == ("whereformer", "compare")
    following = Compare(**parse(Compare, words, "whereformer compare"))
    changes = {"steps": 240, "out": Path("runs/a b-240-steps"), "quick": False}
    assert following == replace(recipe_of(out=Path("runs/a b-quick"), quick=True, causal=True), **changes)
    assert report.next_command in str(report)
    for text in (report.page(), report.markdown(), report._repr_html_()):
        assert report.next_command in html.unescape(text)
    assert report_of({name: METHODS[name] for name in ("tisa", "none")}).next_command == ""


def test_nothing_beats_guessing_and_one_method_alone():
    assert "No method predicts better than guessing by frequency yet" in report_of(guessing=3.9).page()
    assert report_of({"tisa": METHODS["tisa"]}).sentences[0] == "Only tisa was tried; one method is no comparison."
