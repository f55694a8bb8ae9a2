"""Probes end to end, at sizes that take seconds."""

import json
from dataclasses import asdict

import pytest
import torch

import whereformer
from tests.failing import fails, refusals
from whereformer.cli.main import main
from whereformer.lab.score import Cannot
from whereformer.models import EncoderForMaskedLM
from whereformer.studies.probe import run as probing
from whereformer.studies.probe import train
from whereformer.studies.probe.judgment import ERRORS
from whereformer.studies.probe.results import Failed, ProbeResults, Run
from whereformer.studies.probe.settings import DEFAULT_STEPS, ProbeSettings
from whereformer.studies.probe.train import encoder_config, train_and_judge

SHORT = ["--length", "8", "--steps", "3"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Judge on fewer rows than usual."""
    monkeypatch.setattr(train, "JUDGED_ROWS", 64)


def probe(out, *arguments, positions="none,learned,tisa", tasks="previous,passkey"):
    main(["probe", "--out", str(out), "--positions", positions, "--tasks", tasks, *SHORT, *arguments])
    return json.loads((out / "results.json").read_text())


def build_model(settings, position, seed):
    config, baseline = encoder_config(settings, position), encoder_config(settings, "none")
    return train.build_model(EncoderForMaskedLM, config, baseline, seed)


def scores(task, position, steps, length=8):
    run = train_and_judge(task, position, 0, ProbeSettings(length, steps), CPU, lambda loss: None)
    assert isinstance(run, Run)
    return run.scores


def test_it_writes_results_and_report_and_prints_tables(tmp_path, capsys):
    results = probe(tmp_path)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100 or "wrote" in max(out.splitlines(), key=len)
    assert list(results["runs"]) == ["previous", "passkey"]
    assert list(results["runs"]["previous"]) == ["none", "learned", "tisa"]
    learned, tisa = (results["runs"]["previous"][name]["0"]["scores"] for name in ("learned", "tisa"))
    assert list(tisa) == ["8", "16", "32"]
    assert "covers positions 0 to 8" in learned["16"]["cannot"]
    assert results["guesses"]["passkey"] == {"8": 1.0, "16": 1.0, "32": 1.0}
    assert results["settings"]["steps"] == 3
    assert out.count("cannot") == 4
    assert "at 8 symbols" in out
    assert "This is one seed" in out
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_function_does_what_the_command_does(tmp_path):
    by_command = probe(tmp_path)
    results = whereformer.probe(positions=["none", "learned", "tisa"], tasks="previous,passkey", length=8, steps=3)
    for (task, name, seed), run in results.each():
        assert by_command["runs"][task][name][str(seed)]["scores"] == json.loads(json.dumps(asdict(run)["scores"]))
    assert "Accuracy at 8 symbols" in str(results)
    assert "<table" in results._repr_html_()
    assert {path.name for path in results.save(tmp_path / "saved")} == {"report.html", "results.json"}
    assert ProbeResults.load(tmp_path / "saved").runs == results.runs
    assert isinstance(ProbeResults.load(tmp_path).run("previous", "learned", 0).scores[16], Cannot)


def test_methods_start_from_the_same_backbone():
    backbone = build_model(ProbeSettings(8, 1), "none", 5).state_dict()
    for name in ("learned", "tisa", "tupe+t5"):
        state = build_model(ProbeSettings(8, 1), name, 5).state_dict()
        assert all(torch.equal(state[key], weight) for key, weight in backbone.items())
    other = build_model(ProbeSettings(8, 1), "none", 6).state_dict()
    assert any(not torch.equal(other[key], weight) for key, weight in backbone.items())


def test_rope_finds_the_previous_token_and_none_can_only_guess():
    with_rope, without = (scores("previous", name, 80) for name in ("rope", "none"))
    assert with_rope[8].accuracy > 0.95
    assert with_rope[8].ahead > ERRORS * with_rope[8].error
    for score in without.values():
        assert score.ahead <= ERRORS * score.error


def test_what_needs_no_position_none_can_do():
    assert scores("passkey", "none", 60)[8].accuracy > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "previous"])
@pytest.mark.parametrize("position", ["none", "rope", "shaw", "tisa", "learned"])
def test_the_default_training_is_enough(task, position):
    score = scores(task, position, DEFAULT_STEPS, 16)[16]
    if position == "none":
        assert score.ahead <= ERRORS * score.error
    else:
        assert score.accuracy > 0.95


def test_equal_seeds_give_equal_numbers_and_others_do_not():
    def run(seed):
        return train_and_judge("copy", "rope", seed, ProbeSettings(8, 4), CPU, lambda loss: None).scores

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_an_interrupted_run_continues(tmp_path, monkeypatch, capsys):
    real, trained = probing.train_and_judge, []

    def interrupted(task, position, *others):
        if len(trained) == 3:
            trained.append("interrupted")
            raise KeyboardInterrupt
        trained.append((task, position))
        return real(task, position, *others)

    monkeypatch.setattr(probing, "train_and_judge", interrupted)
    with pytest.raises(SystemExit) as stop:
        probe(tmp_path)
    assert stop.value.code == 130
    kept = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert {task: list(runs) for task, runs in kept.items()} == {
        "previous": ["none", "learned", "tisa"],
    }
    results = probe(tmp_path)
    assert trained[4:] == [("passkey", "none"), ("passkey", "learned"), ("passkey", "tisa")]
    assert results["runs"]["previous"] == kept["previous"]
    assert "3 of 6 runs are already done" in capsys.readouterr().out
    monkeypatch.setattr(probing, "train_and_judge", lambda *_: pytest.fail("trained twice"))
    assert probe(tmp_path)["runs"] == results["runs"]


def test_more_methods_tasks_and_seeds_join_what_is_there(tmp_path, capsys):
    first = probe(tmp_path, positions="tisa", tasks="copy")
    more = probe(tmp_path, "--seeds=2", positions="rope,tisa", tasks="sort,copy")
    assert list(more["runs"]) == ["sort", "copy"]
    assert list(more["runs"]["copy"]) == ["rope", "tisa"]
    assert more["runs"]["copy"]["tisa"]["0"] == first["runs"]["copy"]["tisa"]["0"]
    assert set(more["runs"]["sort"]["rope"]) == {"0", "1"}
    assert "each of 2 seeds" in capsys.readouterr().out


def test_other_settings_are_not_mixed(tmp_path, capsys):
    probe(tmp_path)
    message = fails(capsys, "probe", "--out", str(tmp_path), "--length", "8", "--steps", "4")
    assert "holds results with steps 3, not 4" in message


def test_a_loss_that_is_no_number_is_one_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    real = train.build_model

    def broken(kind, config, baseline, seed):
        model = real(kind, config, baseline, seed)
        if config.position == "learned":
            torch.nn.init.constant_(model.encoder.embeddings.word.weight, float("nan"))
        return model

    monkeypatch.setattr(train, "build_model", broken)
    results = probe(tmp_path, tasks="passkey")
    out = capsys.readouterr().out
    assert out.count("passkey, learned, seed 0: failed, the loss is not finite (NaN or inf) after 0 steps") == 1
    assert results["runs"]["passkey"]["learned"]["0"] == {"failed": "the loss is not finite (NaN or inf) after 0 steps"}
    assert "scores" in results["runs"]["passkey"]["tisa"]["0"]
    assert "failed" in (tmp_path / "report.html").read_text()
    assert isinstance(ProbeResults.load(tmp_path / "results.json").run("passkey", "learned", 0), Failed)


def test_an_output_that_is_no_number_is_no_score():
    model = build_model(ProbeSettings(8, 1), "none", 0).eval()
    torch.nn.init.constant_(model.head.decoder.bias, float("nan"))
    assert train.judge(model, train.HeldOutRows.of("copy", 8)) == Cannot(
        "the output is not finite (NaN or inf) at this length"
    )


def test_the_score_and_its_error_by_hand():
    rows = train.HeldOutRows.of("previous", 8)

    class Oracle(torch.nn.Module):
        """Right in every other row."""

        device = CPU

        def forward(self, inputs, labels):
            labels = torch.where(torch.arange(len(labels))[:, None] % 2 == 0, labels, labels - 1)[labels != -100]
            self.logits = torch.nn.functional.one_hot(labels, 20).float()
            return self

    score = train.judge(Oracle(), rows)
    assert score.accuracy == pytest.approx(0.5)
    assert score.ahead == pytest.approx(0.5 - rows.guess)
    # Each row has 7 questions, so its gap is 1 or 0, minus its share of right guesses.
    right = (torch.arange(len(rows.inputs)) % 2 == 0).double()
    gaps = right - rows.guessed.double().sum(1) / 7
    assert score.error == pytest.approx(float(gaps.std()) / len(gaps) ** 0.5)


@pytest.mark.slow
def test_processes_give_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.undo()  # other processes judge on all rows

    def numbers(results):
        return {
            (task, name): run["0"]["scores"] for task, runs in results["runs"].items() for name, run in runs.items()
        }

    one, two = (probe(tmp_path / jobs, "--jobs", jobs) for jobs in ("1", "2"))
    assert list(one["runs"]["previous"]) == list(two["runs"]["previous"])
    assert numbers(one) == numbers(two)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --positions tsia => --positions: unknown position method 'tsia'; did you mean 'tisa'?
        --positions ' , ' => --positions: expected at least one method, got none
        --tasks copi => --tasks: expected copy, previous, match, reverse, sort, brackets, passkey, got 'copi'
        --tasks , => --tasks: expected at least one, got none
        --tasks match --length 6 => --length: expected at least 8 for the task match, got 6
        --length 2 => --length: expected 4 to 512, got 2
        --length 15 => --length: expected an even number, because some rows have two halves, got 15
        --steps 0 => --steps: expected at least 1, got 0
        --seeds 0 => --seeds: expected 1 to 10000, got 0
        --seed -1 => --seed: expected 0 to 4294967295, got -1
        --jobs 0 => --jobs: expected 1 to 1024, got 0
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, tmp_path, capsys):
    assert expected in fails(capsys, "probe", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()
