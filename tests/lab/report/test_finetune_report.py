"""Fine-tuning's page and Markdown, from small results that are made up here."""

import math
import re
from dataclasses import replace

import pytest

from tests.lab.report.pages import Page
from tests.studies.test_finetune_gains import facts_of, results_of, runs_of
from whereformer.studies.finetune.report import build_markdown, build_report
from whereformer.studies.finetune.results import KeptCurves

MINUS, TO = "\N{MINUS SIGN}", "\N{EN DASH}"
ODD = 'mine<b>&"own"'
GAINING = "learned+tisa, S=3"


def two_tasks():
    bump = [round(math.exp(-((offset + 1) ** 2) / 4), 4) for offset in range(-32, 33)]
    return replace(
        results_of({}, kernels=[0, 3]),
        tasks={
            "rte": facts_of(subsets=["train"], rows={"train": 1000, "validation": 277}, cut_rows=7),
            ODD: facts_of(rows={"train": 1000, "validation": 277}),
        },
        runs={
            "rte": {"learned": runs_of(0.6, 0.7, 0.5), GAINING: runs_of(0.65, 0.7, 0.7)},
            ODD: {"learned": runs_of(0.5), GAINING: runs_of(0.4)},
        },
        curves={"rte": {"learned+tisa": KeptCurves(GAINING, 2, [[bump] * 2] * 3)}},
    )


def with_scores(results, *scores):
    """The same where the first task was run with these scores."""
    return replace(results, runs={**results.runs, "rte": {**results.runs["rte"], GAINING: runs_of(*scores)}})


@pytest.fixture
def results():
    return two_tasks()


def test_markdown(results):
    lines = build_markdown(results).splitlines()
    assert "| task | metric | baseline | S = 3 | gain | error reduction |" in lines
    assert f"| rte | accuracy | 60.0 (50.0{TO}70.0) | 70.0 (65.0{TO}70.0) | +10.0 | +25.0% |" in lines
    assert f"| {ODD} | accuracy | 50.0 | 40.0 | {MINUS}10.0 | {MINUS}20.0% |" in lines
    assert "- rte: only part of the official data (train 1,000 rows); do not compare with published scores" in lines
    assert "- rte: 7 rows were truncated to 64 tokens" in lines


def test_the_page_says_what_the_numbers_say(results):
    page = build_report(results)
    assert "<h1>learned+tisa gains most on rte (accuracy): 10.0 points; " in page
    assert "; 1 of 2 rows have a gain, 0 of them with every seed</h1>" in page
    assert f'<td data-order="70.0" style="font-weight: bold">70.0<small>65.0{TO}70.0</small></td>' in page
    assert "<p>rte: only part of the official data (train 1,000 rows); do not compare with published scores</p>" in page
    assert re.search(f'<td data-order="-2[^"]*">{MINUS}20.0%</td>', page)
    assert "mine<b>" not in page
    assert "rte, learned+tisa, S=3, seed 2" in page
    assert page.count('<dialog class="large"') == 2
    Page(page).check_self_contained()
    Page(page).check_references()


def test_the_terminal_shows_the_tables_and_the_verdict(results):
    text = str(results)
    assert max(map(len, text.splitlines())) <= 100
    assert "learned+tisa: scores in percent" in text
    assert f"65.0{TO}70.0" in text
    assert "learned+tisa gains most on rte (accuracy): 10.0 points" in " ".join(text.split())
    assert "Error reduction is that gain divided by" in " ".join(text.split())


def test_results_without_curves_or_baseline(results):
    shown = replace(results.shown, kernels=[3])
    page = build_report(replace(results, curves={}, shown=shown))
    assert "nothing to compare it with" in page
    assert "What the heads learned" not in page
    assert "No position method gained" in build_report(with_scores(results, 0.1))


def test_a_gain_of_every_seed_is_marked(results):
    results = with_scores(results, 0.71, 0.75, 0.8)
    line = f"| rte | accuracy | 60.0 (50.0{TO}70.0) | 75.0 (71.0{TO}80.0) | +15.0* | +37.5% |"
    assert line in build_markdown(results)
    assert "1 of 2 rows have a gain, 1 of them with every seed</h1>" in build_report(results)


def test_facts_of_a_task_are_written_for_people(results):
    page = build_report(results)
    assert "<td>train 1,000, validation 277</td>" in page
    assert "{&#39;" not in page
