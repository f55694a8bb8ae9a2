"""Table 1, measured, end to end at a size that takes seconds."""

import json
import shutil
from dataclasses import asdict

import pytest

import whereformer
from tests.failing import fails, refusals
from tests.studies.test_compare import run
from whereformer import EncoderForMaskedLM
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.studies.compare import run as compare
from whereformer.studies.compare.models import model_folder
from whereformer.studies.compare.results import CompareResults
from whereformer.studies.properties import run as properties

METHODS = "tisa,learned,rope,learned+tisa"


def judge(out, *arguments):
    main(["properties", "--out", str(out), *arguments])
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def comparison(text, tmp_path_factory):
    """A finished comparison."""
    folder = tmp_path_factory.mktemp("comparison")
    run(text, folder, positions=f"none,{METHODS}")
    return folder


def test_it_measures_the_models_of_a_comparison_and_prints_the_table(comparison, tmp_path, capsys):
    results = judge(tmp_path, "--results", str(comparison))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100 or "wrote" in max(out.splitlines(), key=len)
    assert list(results["table"]) == METHODS.split(",")
    words = {name: [tick["holds"] for tick in row.values()] for name, row in results["table"].items()}
    assert words["tisa"][1:] == [True] * 5
    assert words["learned"] == [False, True, False, False, True, False]
    assert words["rope"][1:5] == [False, True, True, True]
    assert "learned covers positions 0 to 15" in results["table"]["learned"]["inductive"]["note"]
    assert results["runs"]["tisa"]["reached"]["total"] == 3 * 5 * 2
    assert results["thresholds"]["interpretable"] == 0.9
    for word in ("tisa", "yes", "no", "translation invariant", "cannot"):
        assert word in out
    page, markdown = ((tmp_path / name).read_text() for name in ("report.html", "results.md"))
    assert "learned covers positions 0 to 15" in page
    assert "| learned+tisa |" in markdown


def test_it_trains_by_itself_and_continues(text, tmp_path, capsys, monkeypatch):
    arguments = ["--data", text, "--length", "8", "--steps", "3", "--positions", "tisa,alibi"]
    real, measured = properties.measure_method, []

    def interrupted(comparison, key, progress):
        (position,) = key
        if position == "alibi" and not measured[1:]:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(position)
        return real(comparison, key, progress)

    monkeypatch.setattr(properties, "measure_method", interrupted)
    with pytest.raises(SystemExit) as stop:
        judge(tmp_path, *arguments)
    assert stop.value.code == 130
    kept = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert set(kept) == {"tisa"}
    trained = json.loads((tmp_path / "comparison" / "results.json").read_text())["runs"]
    assert set(trained) == {"none", "tisa", "alibi"}
    monkeypatch.setattr(compare, "train_and_judge", lambda *_: pytest.fail("trained twice"))
    results = judge(tmp_path, *arguments)
    assert measured == ["tisa", "interrupted", "alibi"]
    assert results["runs"]["tisa"] == kept["tisa"]
    assert set(results["losses"]) == {"none", "tisa", "alibi"}
    assert not results["table"]["alibi"]["data_driven"]["holds"]
    assert "alibi" in capsys.readouterr().out


def test_the_function_does_what_the_command_does(comparison, tmp_path):
    by_command = judge(tmp_path, "--results", str(comparison), "--positions", "tisa")
    results = whereformer.properties(results=comparison, positions=["tisa"], quiet=True)
    ticks = json.loads(json.dumps(asdict(results)["table"]))
    assert ticks["tisa"]["interpretable"]["number"] == by_command["table"]["tisa"]["interpretable"]["number"]
    assert {name: tick["holds"] for name, tick in ticks["tisa"].items()} == {
        name: tick["holds"] for name, tick in by_command["table"]["tisa"].items()
    }
    assert "Measured properties" in str(results)
    assert "<table" in results._repr_html_()
    with pytest.raises(InputError, match="length: only without `results`"):
        whereformer.properties(results=comparison, length=8)


def test_some_methods_of_a_comparison(comparison, tmp_path):
    assert set(judge(tmp_path, "--results", str(comparison), "--positions", "rope")["table"]) == {"rope"}
    both = judge(tmp_path, "--results", str(comparison), "--positions", "tisa,rope")
    assert list(both["table"]) == ["tisa", "rope"]
    again = judge(tmp_path, "--results", str(comparison), "--positions", "tisa")
    assert list(again["table"]) == ["tisa"]
    assert again["runs"] == both["runs"]


def test_a_comparison_keeps_its_models_for_use(comparison):
    model = EncoderForMaskedLM.from_pretrained(model_folder(comparison, "learned+tisa", 0))
    assert model.config.position == "learned+tisa"
    assert not model.config.sparse_prediction


def test_other_results_are_not_mixed(comparison, text, tmp_path, capsys):
    judge(tmp_path / "out", "--results", str(comparison), "--positions", "rope")
    run(text, tmp_path / "other", "--seeds=1", "--mask-rate=0.3", positions="rope")
    message = fails(capsys, "properties", "--out", str(tmp_path / "out"), "--results", str(tmp_path / "other"))
    assert "holds results with mask_rate 0.4, not 0.3" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --positions tsia => --positions: unknown position method 'tsia'; did you mean 'tisa'?
        --positions ' , ' => --positions: expected at least one, got none
        --positions none => --positions: 'none' has no properties
        --length 4 => --length: expected at least 8, got 4
        --steps 0 => --steps: expected at least 1, got 0
        --seeds 0 => --seeds: expected 1 to 10000, got 0
        --data no/such/file => --data: no such file or folder: 'no/such/file'
        --results no/such/folder => --results: no/such/folder/results.json is missing
        --results runs --steps 5 => --steps: only without --results
        --results runs --quick => --quick: only without --results
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, tmp_path, capsys):
    assert expected in fails(capsys, "properties", "--out", str(tmp_path / "out"), *arguments)


def test_a_method_that_the_comparison_lacks(comparison, tmp_path, capsys):
    message = fails(capsys, "properties", "--out", str(tmp_path), "--results", str(comparison), "--positions", "t5")
    assert "has no 't5' to judge; it has tisa, learned, rope, learned+tisa" in message


@pytest.mark.parametrize("content", ['{"format": 1, "settings": {}, "runs": {}}', "half a", '{"format": "finetune 1"}'])
def test_the_folder_of_another_command(content, text, tmp_path, capsys):
    (tmp_path / "results.json").write_text(content)
    message = fails(capsys, "properties", "--out", str(tmp_path / "out"), "--results", str(tmp_path))
    assert "results.json is missing, or not a result of whereformer compare" in message
    arguments = ["--data", text, "--length", "8", "--steps", "1", "--positions", "tisa"]
    message = fails(capsys, "compare", "--out", str(tmp_path), *arguments)
    assert "--out:" in message


def test_an_output_folder_of_another_command(comparison, tmp_path, capsys):
    shutil.copytree(comparison, tmp_path / "out")
    message = fails(capsys, "properties", "--out", str(tmp_path / "out"), "--results", str(comparison))
    assert "is not a complete result of this command" in message
    assert json.loads((tmp_path / "out" / "results.json").read_text())["format"] == CompareResults.FORMAT


def changed(comparison, folder, change):
    """A copy of the comparison with other settings."""
    shutil.copytree(comparison, folder)
    data = json.loads((folder / "results.json").read_text())
    del data["sha256"]  # as if it had been written like this
    change(data)
    (folder / "results.json").write_text(json.dumps(data))
    return ["properties", "--out", str(folder / "out"), "--results", str(folder)]


def test_text_that_is_no_longer_there_or_another(comparison, tmp_path, capsys):
    command = changed(comparison, tmp_path / "a", lambda data: data["text"].update(data=["gone.txt"]))
    assert "can't be read again (no such file or folder: 'gone.txt')" in fails(capsys, *command)
    command = changed(comparison, tmp_path / "b", lambda data: data["settings"].update(text="0"))
    assert "has changed; run whereformer compare again" in fails(capsys, *command)


def test_a_comparison_without_models(comparison, text, tmp_path, capsys):
    command = changed(comparison, tmp_path / "a", lambda data: None)
    shutil.rmtree(tmp_path / "a" / "models")
    message = fails(capsys, *command)
    assert "has no trained model of 'tisa'" in message
    assert "run the same whereformer compare as before" in message
    # What the line says helps.
    run(text, tmp_path / "a", positions=f"none,{METHODS}")
    judge(tmp_path / "a" / "out", "--results", str(tmp_path / "a"))


def test_a_model_that_was_changed_is_not_measured(comparison, tmp_path, capsys):
    command = changed(comparison, tmp_path / "a", lambda data: None)
    model = model_folder(tmp_path / "a", "rope", 0)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "model of 'rope'" in (message := fails(capsys, *command))
    assert "model.safetensors is missing" in message


def test_funnels_are_refused(comparison, tmp_path, capsys):
    command = changed(comparison, tmp_path / "a", lambda data: data["settings"].update(blocks="1-1"))
    assert "--results: expected encoders of one block, got blocks '1-1'" in fails(capsys, *command)


def test_a_comparison_of_nothing_but_the_baseline(comparison, tmp_path, capsys):
    def none_alone(data):
        data["runs"] = {"none": data["runs"]["none"]}

    command = changed(comparison, tmp_path / "a", none_alone)
    assert "has no method besides the baseline" in fails(capsys, *command)
    assert "it has none" in fails(capsys, *command, "--positions", "tisa")
