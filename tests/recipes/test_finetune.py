"""Fine-tuning end to end, at a size that takes seconds."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.failing import fails
from tests.recipes.finetuning import columns, save_glue, save_model
from whereformer import EncoderForSequenceClassification, load_pretrained
from whereformer.cli.main import main
from whereformer.data import glue
from whereformer.lab import loading
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.run import read_records
from whereformer.recipes.finetune import Finetune

TINY = ["--seeds=1", "--epochs=1", "--batch-size=8", "--kernels=0,2", "--device=cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(save_glue(tmp_path_factory.mktemp("glue"), "cola", "mrpc", "mnli", "stsb", subsets=("train",)))


def records(out):
    """The values of a folder's runs, by task, variant and seed."""
    by_key = read_records(Path(out) / "records.jsonl")[1]
    return {tuple(json.loads(name)[1:]): record["value"] for name, record in by_key.items() if '"tune"' in name}


def run(model, data, out, *flags, task="cola"):
    main(["finetune", "--model", model, "--data", data, "--task", task, "--out", str(out), *TINY, *flags])
    return records(out)


def test_it_writes_records_tables_and_a_report(model, data, tmp_path, capsys):
    values = run(model, data, tmp_path, "--position=learned+tisa,tisa", "--seeds=2", task="cola,mnli,stsb")
    out = capsys.readouterr().out
    names = ("learned", "learned+tisa, S=2", "none", "tisa, S=2")
    assert list(values) == [(t, n, s) for t in ("cola", "mnli", "stsb") for s in (0, 1) for n in names]
    assert set(values["mnli", names[1], 0]["scores"]) == {"matched", "mismatched"}
    assert set(values["stsb", "learned", 0]["scores"][""]) == {"pearson", "spearman"}
    assert [step for step, _ in values["mnli", "learned", 1]["losses"]] == [1, 2, 3]
    assert max(map(len, out.splitlines())) <= 100 or "wrote" in max(out.splitlines(), key=len)
    assert "cola, learned+tisa, S=2, seed 1: matthews" in out
    assert "mnli matched" in out
    assert "All models, the best first" in out
    table = (tmp_path / "report.md").read_text()
    assert "| task | metric | baseline | S = 2 | gain | error reduction |" in table
    page = (tmp_path / "report.html").read_text()
    assert "whereformer finetune --" in page


def test_it_learns(model, data, tmp_path):
    values = run(model, data, tmp_path, "--epochs=40", "--learning-rate=0.01", "--kernels=2")
    losses = [loss for _, loss in values["cola", "learned+tisa, S=2", 0]["losses"]]
    assert losses[-1] < 0.5 * losses[0]


def test_a_funnel_with_a_method_of_its_own(tmp_path, data):
    model = save_model(tmp_path / "model", blocks="1-1", decoder_layers="1", position="tisa", max_length=16)
    values = run(model, data, tmp_path / "out", "--position=own,rope")
    assert [name for _, name, _ in values] == ["own", "none", "rope"]


def test_all_models_of_a_seed_start_from_the_same_weights(model):
    learned, tisa, rope = (
        loading.load_for_training(model, position, kernels, 2, seed).state_dict()
        for position, kernels, seed in (("learned", None, 3), ("learned+tisa", 5, 3), ("rope", None, 4))
    )
    backbone = [name for name in learned if not name.startswith("encoder.position.")]
    assert all(torch.equal(learned[name], tisa[name]) for name in backbone)
    assert any("amplitude" in name for name in tisa)
    assert not torch.equal(learned["classifier.out.weight"], rope["classifier.out.weight"])
    assert torch.equal(learned["encoder.embeddings.word.weight"], rope["encoder.embeddings.word.weight"])


def test_predictions_are_in_the_order_of_the_rows(model, tmp_path):
    recipe = Finetune(model=model, data=save_glue(tmp_path, "cola"), task="cola", batch_size=5)
    rows = recipe.prepared.tasks["cola"].train
    classifier = loading.load_for_training(model, "learned", None, 2, 0)
    predictions = recipe.predict(classifier, rows)
    with torch.no_grad():
        alone = [classifier(torch.tensor([list(ids)])).logits[0] for ids, _ in rows.rows]
    torch.testing.assert_close(predictions, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_predictions_that_are_no_numbers_are_one_line(model, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Finetune, "predict", lambda self, model, rows: torch.full((24, 2), math.nan))
    words = ["finetune", "--model", model, "--data", data, "--task=cola", "--out", str(tmp_path), *TINY]
    assert "--learning-rate: learned predicts values that are not finite (NaN or inf)" in fails(capsys, *words)


def test_another_schedule_is_used(model, data, tmp_path):
    usual = run(model, data, tmp_path / "usual", "--position=own", "--learning-rate=0.01")["cola", "own", 0]
    flags = ["--learning-rate=0.01", "--schedule=inverse_sqrt"]
    changed = run(model, data, tmp_path / "other", "--position=own", *flags)["cola", "own", 0]
    assert changed["losses"][0] == usual["losses"][0]
    assert changed["losses"][-1] != usual["losses"][-1]


def test_a_dry_run_trains_and_writes_nothing(model, data, tmp_path, capsys):
    main(
        ["finetune", "--model", model, "--data", data, "--task=cola", "--out", str(tmp_path / "o"), "--dry-run", *TINY]
    )
    out = capsys.readouterr().out
    assert "2: 1 task, 2 models, 1 seed" in out
    assert "A dry run: nothing was trained or written." in out
    assert "3 steps per run" in " ".join(out.split())
    assert not (tmp_path / "o").exists()


def test_own_task(model, tmp_path):
    rows = columns(glue.GLUE["mrpc"], 20)
    lines = [json.dumps(dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)]
    for name in ("mine", "judged"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [f"--train={tmp_path / 'mine.jsonl'}", f"--validation={tmp_path / 'judged.jsonl'}"]
    options = ["--text=sentence1,sentence2", "--label=label", "--out", str(tmp_path / "out"), *TINY]
    main(["finetune", "--model", model, *files, *options, "--position=tisa"])
    assert set(records(tmp_path / "out")["mine", "none", 0]["scores"][""]) == {"accuracy", "matthews"}


def test_classes_and_numbers_go_into_folders_of_their_own(model, tmp_path, capsys):
    rows = [json.dumps({"text": "the cat saw the dog", "label": number % 3}) for number in range(9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    files = [f"--{name}={tmp_path / 'mine.jsonl'}" for name in ("train", "validation")]
    arguments = ["finetune", "--model", model, *files, "--text=text", "--label=label", f"--out={tmp_path}", *TINY]
    main(arguments)
    before = records(tmp_path)
    capsys.readouterr()
    line = fails(capsys, *arguments, "--regression")
    assert "has results for a different model or other rows of mine; choose another folder" in line
    assert records(tmp_path) == before
    # A line that is damaged must not let other rows in.
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text().replace("model or other rows", "modem or other rows"))
    damaged = path.read_bytes()
    assert "is damaged; move it away or choose another folder" in fails(capsys, *arguments, "--regression")
    assert path.read_bytes() == damaged


def test_a_classifier_may_be_tuned_for_other_classes(model, data, tmp_path):
    with quiet_transformers():
        tuned = load_pretrained(model, model_class=EncoderForSequenceClassification, num_labels=3)
    tuned.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "tuned")
    values = run(str(tmp_path / "tuned"), data, tmp_path / "out", "--kernels=2", task="cola,mnli,stsb")
    assert [task for task, _, _ in values] == ["cola", "mnli", "stsb"]


def test_a_model_with_positions_of_its_own(data, tmp_path, capsys):
    arguments = ["finetune", "--data", data, "--task=cola", "--out", str(tmp_path / "out"), "--dry-run", *TINY]
    trained = save_model(tmp_path / "tisa", position="tisa")
    line = fails(capsys, *arguments, "--model", trained)
    assert "which the method 'own' keeps (expected 'encoder.position.amplitude' of shape (2, 2, 2)" in line
    main([*arguments, "--model", trained, "--position=own"])
    assert re.search(r"own +[0-9,]+ parameters", capsys.readouterr().out)
    main([*arguments, "--model", save_model(tmp_path / "learned")])
    out = capsys.readouterr().out
    assert re.search(r"learned +6,962 parameters, 640 of them positional *\n", out)
    assert re.search(r"learned\+tisa, S=2 +6,986 parameters, 664 of them positional, 24 of them new", out)
    main([*arguments, "--model", save_model(tmp_path / "t5", position="t5")])
    assert "640 of them positional, 640 of them new" in capsys.readouterr().out


def test_errors_come_before_training_in_one_line(model, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Finetune, "tune", None)
    out = tmp_path / "out"

    def says(*options, task="cola", model=model):
        return fails(
            capsys, "finetune", "--model", model, "--data", data, "--task", task, f"--out={out}", *TINY, *options
        )

    assert "--task: expected one of sst2, mnli" in says(task="colla")
    assert f"--model: expected a folder with a config.json, got '{tmp_path}'" in says(model=str(tmp_path))
    config = tmp_path / "run" / "model" / "config.json"
    config.parent.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (config.parent / name).write_bytes((Path(model) / name).read_bytes())
    assert f"; did you mean '{config.parent}'?" in says(model=str(config.parent.parent))
    assert "--model: no tokenizer can be read from" in says(model=str(config.parent))
    # transformers would make a billion names, before it looks at anything else.
    for count in (10**9, 1e9):
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_labels": count}))
        assert "num_labels: expected a" in says(model=str(config.parent))
    assert "--position: unknown position method 'tsia'; did you mean 'tisa'?" in says("--position=tsia")
    assert "--kernels: expected an integer, got 'a'" in says("--kernels=a")
    assert "--kernels: expected a number above 0 besides the baseline" in says("--kernels=0")
    bare = tmp_path / "bare"
    AutoTokenizer.from_pretrained(model).save_pretrained(bare)
    (bare / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "--model: expected" in says(model=str(bare))
    (bare / "config.json").write_text(json.dumps({"model_type": "bert", "position_embedding_type": "relative_key"}))
    assert "--model: position_embedding_type: expected 'absolute'" in says(model=str(bare))
    assert not out.exists()


def test_rows_that_are_too_long_are_an_error_or_cut(data, tmp_path, capsys):
    model = save_model(tmp_path / "model", max_length=10)
    arguments = ["finetune", "--model", model, "--data", data, "--task=mrpc", "--out", str(tmp_path / "out"), *TINY]
    line = fails(capsys, *arguments)
    assert "--max-length: the longest row has" in line
    assert "set --max-length 10 to truncate it" in line
    assert "--max-length: " in fails(capsys, *arguments, "--max-length=11")
    main([*arguments, "--max-length=10"])
    assert "rows were truncated to 10 tokens" in capsys.readouterr().out
    assert "rows were truncated to 10 tokens" in (tmp_path / "out" / "report.md").read_text()
    # Methods that go on beyond what was trained need no cut.
    main([*arguments[: -len(TINY)], *TINY, "--position=tisa", "--out", str(tmp_path / "other")])


def test_a_folder_of_something_else_is_refused(model, data, tmp_path, capsys):
    run(model, data, tmp_path)
    capsys.readouterr()
    arguments = ["finetune", "--model", model, "--data", data, "--task=cola", "--out", str(tmp_path), *TINY]
    assert "has results with batch_size 8, not 4" in fails(capsys, *arguments, "--batch-size=4")
    message = "has results for a different model or other rows of cola; choose another folder"
    assert message in fails(capsys, *arguments, "--train-rows=8")
    assert message in fails(capsys, *arguments, "--model", save_model(tmp_path / "other", hidden_size=32))
    (tmp_path / "records.jsonl").write_text('{"format": 1}')
    assert "is not the record of a run" in fails(capsys, *arguments)


@pytest.mark.parametrize("changed", ["positions", "configuration"])
def test_a_model_that_changed_in_its_place_is_refused(changed, model, data, tmp_path, capsys):
    folder = shutil.copytree(model, tmp_path / "model")
    arguments = ["finetune", "--model", str(folder), "--data", data, "--task=cola", f"--out={tmp_path / 'out'}", *TINY]
    main([*arguments, "--position=own"])
    if changed == "positions":
        weights = load_file(folder / "model.safetensors")
        [name] = [name for name in weights if ".position." in name]
        save_file({**weights, name: weights[name] + 1}, folder / "model.safetensors", {"format": "pt"})
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    assert "has results for a different model or other rows" in fails(capsys, *arguments, "--position=own")


def test_a_loss_that_is_no_number_stops_with_advice(model, data, tmp_path, capsys):
    arguments = ["finetune", "--model", model, "--data", data, "--task=cola", "--out", str(tmp_path), *TINY]
    assert "--learning-rate: " in fails(capsys, *arguments, "--learning-rate=1e30")
