"""Fine-tuning's page and Markdown, from small results that are made up here."""

import math
import re

import pytest

from tests.report.pages import Page
from whereformer.experiments.finetune import report

MINUS, TO = "\N{MINUS SIGN}", "\N{EN DASH}"
ODD = 'mine<b>&"own"'


def runs_of(*scores):
    return {str(seed): {"scores": {"": {"accuracy": score}}} for seed, score in enumerate(scores)}


def results_of():
    bump = [round(math.exp(-((offset + 1) ** 2) / 4), 4) for offset in range(-32, 33)]
    facts = {
        "judged": [""],
        "metrics": ["accuracy"],
        "subsets": ["train"],
        "rows": {"train": 1000, "validation": 277},
        "cut_rows": 7,
    }
    return {
        "model": "some/model",
        "settings": {"batch_size": 8, "max_length": 64},
        "tasks": {"rte": facts, ODD: {**facts, "subsets": [], "cut_rows": 0}},
        "runs": {
            "rte": {"learned": runs_of(0.6, 0.7, 0.5), "learned+tisa, S=3": runs_of(0.65, 0.7, 0.7)},
            ODD: {"learned": runs_of(0.5), "learned+tisa, S=3": runs_of(0.4)},
        },
        "curves": {"rte": {"learned+tisa": {"variant": "learned+tisa, S=3", "seed": 2, "heads": [[bump] * 2] * 3}}},
        "shown": {"positions": ["learned+tisa"], "kernels": [0, 3], "seeds": [0, 1, 2]},
        "machine": {"cpu": "a CPU", "threads": 1},
        "versions": {"torch": "2.13"},
    }


@pytest.fixture
def results():
    return results_of()


def test_markdown(results):
    lines = report.build_markdown(results).splitlines()
    assert "| task | metric | baseline | S = 3 | gain | error reduction |" in lines
    assert f"| rte | accuracy | 60.0 (50.0{TO}70.0) | 70.0 (65.0{TO}70.0) | +10.0 | +25.0% |" in lines
    assert f"| {ODD} | accuracy | 50.0 | 40.0 | {MINUS}10.0 | {MINUS}20.0% |" in lines
    assert (
        "- rte: only a part of the official data (train 1,000 rows); not to be compared with published scores" in lines
    )
    assert "- rte: 7 rows were cut to 64 tokens" in lines


def test_the_page_says_what_the_numbers_say(results):
    page = report.build_report(results)
    assert "<h1>learned+tisa gains most on rte (accuracy): 10.0 points; " in page
    assert "; 1 of 2 rows have a gain, 0 of them with every seed</h1>" in page
    assert f'<td data-order="70.0"><strong>70.0</strong><small>65.0{TO}70.0</small></td>' in page
    assert re.search(f'<td data-order="-2[^"]*">{MINUS}20.0%</td>', page)
    assert "mine<b>" not in page
    assert "rte, learned+tisa, S=3, seed 2" in page
    assert page.count('<dialog class="large"') == 2
    Page(page).check_self_contained()
    Page(page).check_references()


def test_results_without_curves_or_baseline(results):
    results["curves"] = {}
    results["shown"]["kernels"] = [3]
    page = report.build_report(results)
    assert "nothing to compare it with" in page
    assert "What the heads learned" not in page
    results["shown"]["kernels"] = [0, 3]
    results["runs"]["rte"]["learned+tisa, S=3"] = runs_of(0.1)
    assert "No position method gained" in report.build_report(results)


def test_a_gain_of_every_seed_is_marked(results):
    results["runs"]["rte"]["learned+tisa, S=3"] = runs_of(0.71, 0.75, 0.8)
    assert f"| rte | accuracy | 60.0 (50.0{TO}70.0) | 75.0 (71.0{TO}80.0) | +15.0* | +37.5% |" in report.build_markdown(
        results
    )
    assert "1 of 2 rows have a gain, 1 of them with every seed</h1>" in report.build_report(results)


def test_facts_of_a_task_are_written_for_people(results):
    page = report.build_report(results)
    assert "<td>train 1,000, validation 277</td>" in page
    assert "{&#39;" not in page
