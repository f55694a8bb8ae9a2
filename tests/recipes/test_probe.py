"""Probes end to end, at sizes that take seconds, and what their numbers say."""

import json
import statistics

import pytest
import torch

from tests.failing import fails, refusals
from tests.lab.report.pages import Page
from whereformer.cli.main import main
from whereformer.lab.run import read_records
from whereformer.lab.sheet import Cell
from whereformer.recipes import probe
from whereformer.recipes.probe import ERRORS, CellResult, Probe, ProbeResult, Rows, evaluate

SHORT = {"length": 8, "steps": 3}
GUESS = 0.2
CANNOT = "no positions there"


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Judge on fewer rows than usual."""
    monkeypatch.setattr(probe, "EVAL_ROWS", 64)


def records(out):
    """The values of a folder's trainings, by seed, task and method."""
    by_key = read_records(out / "records.jsonl")[1]
    return {tuple(json.loads(name)[1:]): content["value"] for name, content in by_key.items()}


def run(out, *words, positions="none,learned,tisa", tasks="previous,passkey"):
    short = ["--length", "8", "--steps", "3", "--jobs", "1"]
    main(["probe", "--out", str(out), "--positions", positions, "--tasks", tasks, *short, *words])
    return records(out)


def scores(task, position, steps, length=8, seed=0):
    class Device:
        device, advance, log = "cpu", staticmethod(lambda *_: None), print

    recipe = Probe(length=length, steps=steps)
    return recipe.train(Device(), seed, task, position).scores


def test_it_writes_records_and_report_and_prints_tables(tmp_path, capsys):
    values = run(tmp_path)
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines() if str(tmp_path) not in line)
    assert f"--tasks previous,passkey --out {tmp_path}-500-steps" in out
    assert list(values) == [(0, task, name) for task in ("previous", "passkey") for name in ("none", "learned", "tisa")]
    assert "covers positions 0 to 8" in values[0, "previous", "learned"]["scores"][1]
    assert out.count("n/a") == 4 + 1  # and what it means
    assert "at 8 symbols" in out
    assert "This is one seed" in out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    Page(page).check_self_contained()
    Page(page).check_references()
    assert "whereformer probe " in page
    assert "d a c b" in page
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## Accuracy at 8 symbols, the training length" in markdown
    assert "| guessing |" in markdown


def test_rope_finds_the_previous_token_and_none_can_only_guess():
    with_rope, without = (scores("previous", name, 80) for name in ("rope", "none"))
    accuracy, ahead, error = with_rope[0]
    assert accuracy > 0.95
    assert ahead > ERRORS * error
    assert all(ahead <= ERRORS * error for _, ahead, error in without)


def test_what_needs_no_position_none_can_do():
    assert scores("passkey", "none", 60)[0][0] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "previous"])
@pytest.mark.parametrize("position", ["none", "rope", "shaw", "tisa", "learned"])
def test_the_default_training_is_enough(task, position):
    accuracy, ahead, error = scores(task, position, 500, 16)[0]
    assert (ahead <= ERRORS * error) if position == "none" else (accuracy > 0.95)


def test_equal_seeds_give_equal_numbers_and_others_do_not():
    one, same, different = (scores("copy", "rope", 4, seed=seed) for seed in (1, 1, 2))
    assert one == same != different


def test_more_methods_tasks_and_seeds_join_what_is_there(tmp_path, capsys):
    first = run(tmp_path, positions="tisa", tasks="copy")
    later = run(tmp_path, "--seeds=2", positions="rope,tisa", tasks="sort,copy")
    assert len(later) == 8
    assert later.items() >= first.items()
    out = capsys.readouterr().out
    assert "1 of 8 runs are already done; continuing with the others" in out
    assert "each of 2 seeds" in out


def test_a_loss_that_is_no_number_is_one_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    real = Probe.build

    def broken(self, position, seed):
        model = real(self, position, seed)
        if position == "learned":
            torch.nn.init.constant_(model.encoder.embeddings.word.weight, float("nan"))
        return model

    monkeypatch.setattr(Probe, "build", broken)
    values = run(tmp_path, tasks="passkey")
    problem = "the loss is not finite (NaN or inf) after 0 steps"
    assert capsys.readouterr().out.count(f"passkey, learned, seed 0: failed, {problem}") == 1
    assert values[0, "passkey", "learned"] == {"scores": [], "failed": problem, "examples": []}
    assert values[0, "passkey", "tisa"]["scores"]
    assert f'title="{problem}">failed' in (tmp_path / "report.html").read_text()


def test_an_output_that_is_no_number_is_no_score():
    model = Probe(length=8).build("none", 0).eval()
    torch.nn.init.constant_(model.head.decoder.bias, float("nan"))
    assert evaluate(model, "copy", 8) == "the output is not finite (NaN or inf) at this length"


def test_the_score_and_its_error_by_hand():
    rows = Rows.of("previous", 8)

    class Oracle(torch.nn.Module):
        """Right in every other row."""

        device = "cpu"

        def forward(self, inputs, labels):
            labels = torch.where(torch.arange(len(labels))[:, None] % 2 == 0, labels, labels - 1)[labels != -100]
            self.logits = torch.nn.functional.one_hot(labels, 20).float()
            return self

    accuracy, ahead, error = evaluate(Oracle(), "previous", 8)
    assert accuracy == pytest.approx(0.5)
    assert ahead == pytest.approx(0.5 - rows.guess)
    # Each row has 7 questions, so its gap is 1 or 0, minus its share of right guesses.
    right = (torch.arange(len(rows.inputs)) % 2 == 0).double()
    gaps = right - rows.is_guessed.double().sum(1) / 7
    assert error == pytest.approx(float(gaps.std()) / len(gaps) ** 0.5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --tasks copi => --tasks: expected one of copy, previous, match, reverse, sort, brackets, passkey, got 'copi'
        --tasks match --length 6 => --length: expected at least 8 for the task match, got 6
        --length 15 => --length: expected an even number, because some rows have two halves, got 15
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, tmp_path, capsys):
    assert expected in fails(capsys, "probe", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()


def outcome(accuracy, longer=GUESS, error=0.01):
    """A model with an accuracy at the first length, and another or a reason at the second."""
    longer = longer if isinstance(longer, str) else [longer, longer - GUESS, error]
    return ProbeResult([[accuracy, accuracy - GUESS, error], longer])


@pytest.mark.parametrize(
    ("accuracies", "text", "detail"),
    [
        ([0.95], "95.0%*", ""),
        ([1.0, 0.96], "98.0%*", "96%\N{EN DASH}100%"),
        ([0.94], "94.0%", ""),
        ([1.0, 0.3], "65.0%", "30%\N{EN DASH}100%"),
        ([0.25], "25.0%", ""),
        ([0.239], "(23.9%)", ""),
        ([0.2, 0.23], "(21.5%)", "20%\N{EN DASH}23%"),
        ([1.0, 0.2], "60.0%?", "20%\N{EN DASH}100%"),
    ],
)
def test_the_marks_of_a_cell(accuracies, text, detail):
    result = CellResult.of([outcome(accuracy) for accuracy in accuracies], 0)
    assert (result.cell.text, result.cell.detail, result.is_solved) == (text, detail, text.endswith("*"))
    assert result.cell.style == f"--share: {statistics.median(accuracies):.1%}"


def test_cells_without_a_number():
    failed, cannot = (
        CellResult.of([outcome(1.0), ProbeResult([], "it broke")], 0),
        CellResult.of([outcome(1.0, CANNOT)], 1),
    )
    assert failed == (Cell("failed", title="it broke"), False)
    assert cannot == (Cell("n/a", title=CANNOT), False)


def test_examples_are_a_solved_and_a_failed_row(monkeypatch):
    recipe = Probe(length=4, steps=1, positions=["none", "tisa"], tasks=["reverse", "brackets"])
    rows_of = {task: probe.find_examples(recipe.build("none", 0).eval(), task, 4) for task in recipe.tasks}
    ((word, inputs, right, answers),) = rows_of["reverse"]
    assert (word, inputs.split()) == ("failed", right.split()[::-1])
    assert answers.split() != right.split()
    assert set(rows_of["brackets"][-1][1].split()) <= {"(", ")"}
    results = {
        (0, task, name): ProbeResult(
            [[0.5, 0.1, 0.01]] * 3, examples=[["solved" if name == "tisa" else "failed", *"abc"]]
        )
        for task in recipe.tasks
        for name in recipe.positions
    }
    sheet = recipe.report(results, range(1)).sections[-1]
    rows = [[cell.text for cell in row] for row in sheet.rows]
    assert rows[:2] == [["reverse", "failed", "none", *"abc"], ["reverse", "solved", "tisa", *"abc"]]
    assert len(rows) == 4
