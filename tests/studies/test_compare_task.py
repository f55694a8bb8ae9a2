"""Comparisons on a labeled table: what is trained, what is judged, and what the ranking claims."""

import csv
import json
import logging
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.failing import fails
from tests.studies.test_compare_ranking import SETTINGS, TEXT
from tests.studies.trainings import TINY_ENCODER
from whereformer.cli.main import main
from whereformer.lab.progress import Progress
from whereformer.studies.compare import task
from whereformer.studies.compare.prepare import prepare
from whereformer.studies.compare.ranking import noise_of, rank
from whereformer.studies.compare.results import (
    CompareResults,
    CompareTask,
    Run,
    Score,
    TaskScore,
)
from whereformer.studies.compare.settings import Compare
from whereformer.studies.compare.task import judged, tune, tuning_steps

TINY = ["--rate-factors=1", "--positions=none,tisa", *TINY_ENCODER, "--seeds=2"]
WORDS = ("red", "blue", "tall", "small", "old", "new", "house", "tree", "river", "stone")
FACTS = CompareTask("a.csv", "b.csv", ["text"], "label", ["no", "yes"], "accuracy", 100, 100, 0, 0.5)


def write_table(path, rows, seed):
    """A table whose texts hold "good" or "bad" at any place, with the class, and the number of such words."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "other", "label", "number"])
        for _ in range(rows):
            words = draw.choices(WORDS, k=8)
            good = draw.random() < 0.5
            words[draw.randrange(8)] = "good" if good else "bad"
            table.writerow([" ".join(words), " ".join(draw.choices(WORDS, k=3)), "yes" if good else "no", int(good)])


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    write_table(folder / "train.csv", 1200, 0)
    write_table(folder / "validation.csv", 60, 1)
    return folder


def options(tables, text="text", label="label"):
    files = [f"--{name}={tables / name}.csv" for name in ("train", "validation")]
    return [*files, f"--text={text}", f"--label={label}"]


def run(tables, out, *more, **columns):
    main(["compare", *options(tables, **columns), "--out", str(out), *TINY, *more])
    return json.loads((out / "results.json").read_text())


def test_every_method_is_tuned_judged_and_ranked(tables, tmp_path, capsys):
    results = run(tables, tmp_path)
    shown = capsys.readouterr().out
    assert "1,200 training and 60 validation rows" in shown
    assert "guessing the most frequent class: accuracy" in shown
    assert "Accuracy on 60 rows (higher is better), and masked-LM loss" in shown
    assert results["task"]["classes"] == ["no", "yes"]
    for by_seed in results["runs"].values():
        assert set(by_seed) == {"0", "1"}
        for found in by_seed.values():
            assert len(found["task"]["rows"]) == 60
            assert found["task"]["score"] == pytest.approx(sum(found["task"]["rows"]) / 60)
            assert set(found["scores"]) == {"16", "32", "64"}
    report = (tmp_path / "report.html").read_text()
    assert "fine-tuned to predict label from text" in report
    assert f"--train {tables / 'train.csv'} --validation" in report
    message = fails(capsys, "positions", "--measure", str(tmp_path))
    assert "--measure: expected a comparison on a text, got one on a labeled table" in message
    changed = fails(capsys, "compare", *options(tables, label="number"), "--out", str(tmp_path), *TINY)
    assert "holds results with task" in changed


def test_numbers_and_pairs_of_texts(tables, tmp_path):
    results = run(tables, tmp_path, "--regression", "--positions=none", text="text,other", label="number")
    assert results["task"]["metric"] == "spearman"
    assert results["task"]["text"] == ["text", "other"]
    assert "classes" not in results["task"] or results["task"]["classes"] is None
    assert "--regression" in (tmp_path / "report.html").read_text()


def test_any_number_of_classes_is_quiet(tables, tmp_path, caplog, monkeypatch):
    # Its messages do not reach the root, where they would be captured.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (tmp_path / "tables").mkdir()
    for name in ("train", "validation"):
        rows = (tables / f"{name}.csv").read_text().splitlines()
        rows[1:] = [row.replace(",yes,", f",{number % 3},") for number, row in enumerate(rows[1:])]
        (tmp_path / "tables" / f"{name}.csv").write_text("\n".join(rows))
    results = run(tmp_path / "tables", tmp_path / "out", "--positions=none", "--jobs=1")
    assert results["task"]["classes"] == ["0", "1", "2", "no"]
    assert "id2label" not in caplog.text


def test_tuning_learns_and_leaves_the_encoder_as_it_was(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(task, "RATE_SHARE", 1.0)
    from whereformer.studies.compare.models import untrained

    small = {"length": 16, "hidden_size": 16, "blocks": "1", "vocab_size": 80, "steps": 480}
    table = {"train": tables / "train.csv", "validation": tables / "validation.csv", "text": "text", "label": "label"}
    job = Compare(positions="none", **small, **table).job()
    material, sizes = prepare(job, tmp_path, Progress()), job.settings
    assert tuning_steps(sizes, material.rows) == 120
    model = untrained(sizes, "none", material.vocab_size, 0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses = []
    found = tune(material.rows, sizes, "none", 0, 8e-3, model, losses.append)
    assert len(losses) == 120
    assert found.score > 0.9
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_the_shares_of_rows_have_the_scores_mean():
    draw = np.random.default_rng(0)
    labels = draw.normal(size=300)
    logits = (labels + draw.normal(size=300))[:, None]
    numbers = CompareTask(**{**vars(FACTS), "classes": None, "metric": "spearman"})
    found = judged(numbers, labels.tolist(), logits)
    assert found.score == pytest.approx(stats.spearmanr(labels, logits[:, 0]).statistic)
    assert np.mean(found.rows) == pytest.approx(found.score, abs=1e-3)
    # The error over rows is that of resampling them.
    resampled = [
        stats.spearmanr(labels[rows], logits[rows, 0]).statistic for rows in draw.integers(300, size=(400, 300))
    ]
    assert np.std(found.rows) / 300**0.5 == pytest.approx(np.std(resampled), rel=0.2)
    right = judged(FACTS, [0, 1, 1], np.array([[2.0, 1], [2, 1], [1, 2]]))
    assert (right.score, right.rows) == (pytest.approx(2 / 3), [1, 0, 1])
    assert judged(numbers, [1.0, 2.0], np.zeros((2, 1))).score == 0.0


def results_of(**scores):
    """Results with a share of right rows per method and seed."""
    settings = replace(SETTINGS, task="0")

    def run_of(right):
        rows = [1.0] * round(100 * right) + [0.0] * (100 - round(100 * right))
        return Run(1e-3, 1.0, [], {8: Score(4.0, 0.5)}, [4.0], 3, 100, None, [], TaskScore(right, rows))

    runs = {name: dict(enumerate(map(run_of, each))) for name, each in scores.items()}
    return CompareResults(settings, runs, TEXT, 100, task=FACTS)


def test_methods_are_ranked_by_labels_and_what_seeds_do_to_them():
    ranking = rank(results_of(a=[0.7, 0.71, 0.7], b=[0.9, 0.9, 0.91], c=[0.9, 0.91, 0.9]))
    assert [(row.position, row.rank) for row in ranking.rows] == [("b", 1), ("c", 1), ("a", 3)]
    assert ranking.verdict == "b and c predict these labels best; they can't be told apart."
    assert ranking.rows[0].score_error == pytest.approx((0.09 / 99) ** 0.5, rel=0.05)
    loud = rank(results_of(a=[0.6, 0.9, 0.75], b=[0.9, 0.95, 0.8]))
    assert [row.rank for row in loud.rows] == [1, 1]


def test_the_noise_of_seeds_is_measured_with_what_few_of_them_tell():
    gaps = np.array([0.1, 0.14])
    found = noise_of(results_of(a=[0.5, 0.5], b=[0.6, 0.64]))
    assert found == pytest.approx(stats.t.ppf(0.975, 1) * gaps.std(ddof=1))
    assert noise_of(results_of(a=[0.5], b=[0.6])) == float("inf")


def test_nobody_wins_before_anyone_beats_guessing_the_class():
    verdict = rank(results_of(a=[0.5, 0.52], b=[0.4, 0.4])).verdict
    assert verdict.startswith("No method predicts these labels better than guessing")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--text=nope"], "expected a column 'nope', found text, other, label, number"),
        (["--label=nope"], "expected a column 'nope', found text, other, label, number"),
        (["--text=text,other,label"], "--text: expected one column or two"),
        (["--seeds=1"], "--seeds: expected 2 to 10000, got 1"),
        (["--data=x"], "--data: only without --train, whose rows are the text"),
        (["--validation=EMPTY"], "expected at least one row, got none"),
        (["--train=ONE"], "--label: expected at least two classes in"),
        (["--train=ONE", "--label=number", "--regression"], "--label: expected at least two different numbers in"),
        (["--train=EMPTY"], "EMPTY.csv: expected at least one row, got none"),
        (["--validation=OTHER"], "OTHER.csv, row 1: expected one of the training rows' classes, no, yes, got 'maybe'"),
        (["--validation=BARE"], "BARE.csv, row 1: expected one of the training rows' classes, no, yes, got none"),
        (["--train=BARE"], "BARE.csv, row 1: expected one of the training rows' classes, no, yes, got none"),
        (["--train=FEW"], "--train: too little text to hold some out"),
    ],
)
def test_bad_tables_give_one_line(tables, tmp_path, capsys, more, expected):
    head = "text,other,label,number\n"
    (tmp_path / "EMPTY.csv").write_text(head)
    (tmp_path / "ONE.csv").write_text(head + "some text about something,b,yes,1\n" * 1200)
    (tmp_path / "FEW.csv").write_text(head + "a,b,yes,1\na,b,no,0\n")
    (tmp_path / "OTHER.csv").write_text(head + "a,b,yes,1\na,b,maybe,0\n")
    (tmp_path / "BARE.csv").write_text(head + "a,b,yes,1\na,b, ,0\na,b,no,1\n")
    named = [
        f"{word.partition('=')[0]}={tmp_path / word.partition('=')[2]}.csv"
        if word.endswith(("Y", "E", "W", "R"))
        else word
        for word in more
    ]
    message = fails(capsys, "compare", *options(tables), *TINY, "--out", str(tmp_path / "out"), *named)
    assert expected in message


def test_a_part_of_a_task_is_refused(capsys, tmp_path):
    assert "--text: only with --train" in fails(capsys, "compare", "--text=a", "--out", str(tmp_path))
    assert "--validation: a task of your own (--train) needs it" in fails(
        capsys, "compare", "--train=a.csv", "--out", str(tmp_path)
    )


def test_rows_that_are_cut_are_in_the_headline_with_a_length_that_would_do(tables, tmp_path, capsys):
    results = run(tables, tmp_path, "--length=8", "--vocab-size=64")
    assert results["task"]["cut_rows"] > 1000
    suggested = results["task"]["whole_length"]
    shown = capsys.readouterr().out
    assert f"rows were cut to 8 tokens; --length {suggested} reads nine in ten of them whole." in shown
    assert "with 2 methods and 2 seeds, only large differences can be told from chance; --seeds 4 would do" in shown
    heading = re.search("<h1>(.*)</h1>", (tmp_path / "report.html").read_text())[1]
    assert f"--length {suggested}" in heading
    again = run(tables, tmp_path / "longer", f"--length={suggested}")["task"]
    assert again["cut_rows"] < 0.1 * 1260
