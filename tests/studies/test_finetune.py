"""Fine-tuning end to end, at a size that takes seconds."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

import whereformer
from tests.failing import fails
from tests.studies.finetuning import columns, save_glue, save_model
from whereformer import Encoder, EncoderForSequenceClassification, load_pretrained
from whereformer.cli.main import main
from whereformer.data import glue
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.progress import Progress
from whereformer.lab.training.optimizer import build_optimizer
from whereformer.positions.tisa import Tisa
from whereformer.studies.finetune import run as finetune
from whereformer.studies.finetune.models import fresh
from whereformer.studies.finetune.prepare import prepare
from whereformer.studies.finetune.results import FinetuneResults
from whereformer.studies.finetune.run import FinetuneJob
from whereformer.studies.finetune.settings import DataSettings, TuningSettings
from whereformer.studies.finetune.train import predict
from whereformer.studies.finetune.variants import Variant, settings_of

TINY = ["--seeds=1", "--epochs=1", "--batch-size=8", "--kernels=0,2", "--device=cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(save_glue(tmp_path_factory.mktemp("glue"), "cola", "mrpc", "mnli", "stsb", subsets=("train",)))


def run(model, data, out, *more, task="cola"):
    main(["finetune", "--model", model, "--data", data, "--task", task, "--out", str(out), *TINY, *more])
    return json.loads((out / "results.json").read_text())


def scores(results, task="cola"):
    return {
        name: {seed: found["scores"] for seed, found in by_seed.items()}
        for name, by_seed in results["runs"][task].items()
    }


def test_it_writes_results_a_table_and_a_report(model, data, tmp_path, capsys):
    run(model, data, tmp_path, task="mrpc,mnli,stsb")
    options = ["--position=learned+tisa,tisa", "--seeds=2"]
    results = run(model, data, tmp_path, *options)
    out = capsys.readouterr().out
    # The first tasks are kept, and shown.
    assert set(results["runs"]) == {"cola", "mrpc", "mnli", "stsb"}
    assert set(results["runs"]["cola"]) == {"learned", "learned+tisa, S=2", "none", "tisa, S=2"}
    found = results["runs"]["mnli"]["learned+tisa, S=2"]["0"]
    assert set(found["scores"]) == {"matched", "mismatched"}
    assert set(results["runs"]["mrpc"]["learned"]["0"]["scores"][""]) == {"f1", "accuracy"}
    assert set(results["runs"]["stsb"]["learned"]["0"]["scores"][""]) == {"pearson", "spearman"}
    assert [point["step"] for point in found["train_loss"]] == [1, 2, 3]
    assert results["parameters"]["tisa, S=2"]["position"] == 2 * 2 * 3 * 2
    assert results["versions"]["scikit-learn"]
    assert results["shown"] == {"positions": ["learned+tisa", "tisa"], "kernels": [0, 2], "seeds": [0, 1]}
    assert "do not compare with published scores" in out
    assert "cola: only part of the official data (train 24 rows)" in out
    assert max(map(len, out.splitlines())) <= 100 or "wrote" in max(out.splitlines(), key=len)
    assert "cola, learned+tisa, S=2, seed 1: matthews" in out
    assert "mnli matched" in out
    # The last run of each task and method, at offsets -32 to 32.
    kept = results["curves"]["cola"]["learned+tisa"]
    assert (kept["variant"], kept["seed"]) == ("learned+tisa, S=2", 1)
    assert [len(part) for part in (kept["heads"], kept["heads"][0], kept["heads"][0][0])] == [2, 2, 65]
    table = (tmp_path / "results.md").read_text()
    assert "| task | metric | baseline | S = 2 | gain | error reduction |" in table
    assert "cola: only part of the official data (train 24 rows)" in table
    page = (tmp_path / "report.html").read_text()
    assert "What the heads learned" in page
    assert page.count("<summary>cola, ") == 2


def test_the_function_does_what_the_command_does(model, data, tmp_path):
    by_command = run(model, data, tmp_path)
    options = {"model": model, "data": data, "task": ["cola"], "kernels": [0, 2], "seeds": 1, "epochs": 1}
    results = whereformer.finetune(**options, batch_size=8, device="cpu", quiet=True)
    found = {
        name: {seed: run["scores"] for seed, run in runs.items()}
        for name, runs in asdict(results)["runs"]["cola"].items()
    }
    assert json.loads(json.dumps(found)) == scores(by_command)
    assert "learned+tisa: scores in percent" in str(results)
    assert "<table" in results._repr_html_()
    assert {path.name for path in results.save(tmp_path / "s")} == {"report.html", "results.md", "results.json"}
    assert FinetuneResults.load(tmp_path / "s").runs == results.runs
    plan = whereformer.finetune(**options, dry_run=True, quiet=True)
    assert "2: 1 task, 2 models, 1 seed" in str(plan)


def test_it_learns(model, data, tmp_path):
    results = run(model, data, tmp_path, "--epochs=40", "--learning-rate=0.01", "--kernels=2")
    losses = [point["loss"] for point in results["runs"]["cola"]["learned+tisa, S=2"]["0"]["train_loss"]]
    assert losses[-1] < 0.5 * losses[0]


def test_a_finished_run_is_never_repeated(model, data, tmp_path, monkeypatch, capsys):
    whole = run(model, data, tmp_path / "whole", "--seeds=2")
    real, done = finetune.finetune_one, []

    def interrupted(job, encoded, variant, seed, *others):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((variant.name, seed))
        return real(job, encoded, variant, seed, *others)

    monkeypatch.setattr(finetune, "finetune_one", interrupted)
    with pytest.raises(SystemExit) as stop:
        run(model, data, tmp_path / "parts", "--seeds=2")
    assert stop.value.code == 130
    capsys.readouterr()
    # One seed of every model comes before the next.
    assert done == [("learned", 0), ("learned+tisa, S=2", 0), ("learned", 1)]
    done.clear()
    resumed = run(model, data, tmp_path / "parts", "--seeds=2")
    assert done == [("learned+tisa, S=2", 1)]
    assert "3 of 4 runs are already done" in capsys.readouterr().out
    assert scores(resumed) == scores(whole)
    losses = [results["runs"]["cola"]["learned+tisa, S=2"]["1"]["train_loss"] for results in (whole, resumed)]
    assert losses[0] == losses[1]
    # More can be asked for later: nothing that is there is done again.
    done.clear()
    more = run(model, data, tmp_path / "parts", "--seeds=1", "--kernels=0,1,2", "--position=learned+tisa")
    assert done == [("learned+tisa, S=1", 0)]
    assert len(more["runs"]["cola"]["learned"]) == 2


def test_packed_scores_are_padded_ones(tmp_path, data):
    model = save_model(tmp_path / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    options = ["--learning-rate=0.01", "--epochs=3"]
    padded = run(model, data, tmp_path / "padded", *options, task="stsb")
    packed = run(model, data, tmp_path / "packed", *options, "--packed", task="stsb")
    for name, by_seed in scores(padded, "stsb").items():
        # Not Spearman's: rounding may change an order.
        assert scores(packed, "stsb")[name]["0"][""]["pearson"] == pytest.approx(by_seed["0"][""]["pearson"], abs=1e-3)


def test_a_funnel_with_a_method_of_its_own(tmp_path, data):
    model = save_model(tmp_path / "model", blocks="1-1", decoder_layers="1", position="tisa", max_length=16)
    results = run(model, data, tmp_path / "out", "--position=own,rope")
    assert set(results["runs"]["cola"]) == {"own", "none", "rope"}


def job_of(model, data, **tuning):
    tasks = DataSettings(task="cola", data=data)
    settings = settings_of(["learned+tisa"], [0, 3])
    tokenizer = AutoTokenizer.from_pretrained(model)
    return FinetuneJob(model, tokenizer, tasks, settings, [0], TuningSettings(**tuning), torch.device("cpu"))


def test_all_models_of_a_seed_start_from_the_same_weights(model):
    learned, tisa, other = (
        fresh(model, variant, 2, seed).state_dict()
        for variant, seed in (
            (Variant("", "learned"), 3),
            (Variant("", "learned+tisa", 5), 3),
            (Variant("", "rope"), 4),
        )
    )
    backbone = [name for name in learned if not name.startswith("encoder.position.")]
    assert all(torch.equal(learned[name], tisa[name]) for name in backbone)
    assert any("amplitude" in name for name in tisa)
    assert not torch.equal(learned["classifier.out.weight"], other["classifier.out.weight"])
    assert torch.equal(learned["encoder.embeddings.word.weight"], other["encoder.embeddings.word.weight"])


@pytest.mark.parametrize("model_class", [None, BertForMaskedLM])
def test_trained_position_embeddings_stay_unless_they_are_dropped(model, tmp_path, model_class):
    folder = model
    if model_class is not None:
        size = {"vocab_size": 90, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        with quiet_transformers():
            model_class(BertConfig(**size, intermediate_size=32, max_position_embeddings=40)).save_pretrained(tmp_path)
        folder = str(tmp_path)
    with quiet_transformers():
        trained = load_pretrained(folder, model_class=Encoder).position.state_dict()
        added, alone = (fresh(folder, Variant("", name, 3), 2, 0) for name in ("learned+tisa", "tisa"))
    learned = added.encoder.position.parts[0].state_dict()
    assert trained.keys() == learned.keys()
    assert all(torch.equal(trained[name], learned[name]) for name in trained)
    assert set(alone.encoder.position.state_dict()) == {"amplitude", "sharpness", "center"}


def test_predictions_are_in_the_order_of_the_rows(model, tmp_path):
    job = job_of(model, save_glue(tmp_path, "cola"), batch_size=5)
    encoded = prepare(job, Progress()).tasks["cola"]
    classifier = fresh(model, Variant("", "learned"), 2, 0)
    found = predict(classifier, encoded.train, job.tuning)
    with torch.no_grad():
        alone = [classifier(torch.tensor([row["ids"]])).logits[0] for row in encoded.train]
    torch.testing.assert_close(torch.tensor(np.stack(found)), torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_kernels_may_learn_faster(model):
    classifier = fresh(model, Variant("", "learned+tisa", 3), 2, 0)
    (tisa,) = (module for module in classifier.modules() if isinstance(module, Tisa))
    optimizer = build_optimizer(classifier, 1e-5, kernel_learning_rate=1e-2)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    kernels = {id(parameter) for parameter in tisa.parameters()}
    assert rates == {id(p): 1e-2 if id(p) in kernels else 1e-5 for p in classifier.parameters()}


@pytest.mark.parametrize("optimizer", ["muon", "stable_adamw"])
def test_another_optimizer_and_schedule_are_used_and_each_run_is_reported(model, data, tmp_path, optimizer):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    usual = run(model, data, tmp_path / "usual", "--position=own", "--learning-rate=0.01")
    more = ["--learning-rate=0.01", f"--optimizer={optimizer}", "--schedule=wsd", "--report-to=tensorboard"]
    other = run(model, data, tmp_path / "other", "--position=own,learned+tisa", *more)
    assert not (tmp_path / "usual" / "tensorboard").exists()
    assert other["settings"]["optimizer"] == optimizer
    losses = other["runs"]["cola"]["own"]["0"]["train_loss"]
    assert losses[0] == usual["runs"]["cola"]["own"]["0"]["train_loss"][0]
    assert losses[-1] != usual["runs"]["cola"]["own"]["0"]["train_loss"][-1]
    names = {path.name for path in (tmp_path / "other" / "tensorboard").iterdir()}
    assert names >= {"cola-own-seed0", "cola-learned+tisa-S=2-seed0"}
    events = EventAccumulator(str(tmp_path / "other" / "tensorboard" / "cola-own-seed0")).Reload()
    reported = [(point.step, round(point.value, 4)) for point in events.Scalars("train/loss")]
    assert reported == [(point["step"], pytest.approx(point["loss"], abs=1e-4)) for point in losses]


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
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["runs"]["mine"]["none"]["0"]["scores"][""]) == {"accuracy", "matthews"}


def test_classes_and_numbers_go_into_folders_of_their_own(model, tmp_path, capsys):
    rows = [json.dumps({"text": "the cat saw the dog", "label": number % 3}) for number in range(9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    files = [f"--{name}={tmp_path / 'mine.jsonl'}" for name in ("train", "validation")]
    arguments = ["finetune", "--model", model, *files, "--text=text", "--label=label", f"--out={tmp_path}", *TINY]
    main(arguments)
    before = (tmp_path / "results.json").read_text()
    capsys.readouterr()
    line = fails(capsys, *arguments, "--regression")
    assert "holds results for other rows of mine; choose another folder" in line
    assert (tmp_path / "results.json").read_text() == before


def test_a_classifier_may_be_tuned_for_other_classes(model, data, tmp_path):
    with quiet_transformers():
        tuned = load_pretrained(model, model_class=EncoderForSequenceClassification, num_labels=3)
    tuned.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "tuned")
    results = run(str(tmp_path / "tuned"), data, tmp_path / "out", "--kernels=2", task="cola,mnli,stsb")
    assert set(results["runs"]) == {"cola", "mnli", "stsb"}


def test_a_model_with_positions_of_its_own(data, tmp_path, capsys):
    arguments = ["finetune", "--data", data, "--task=cola", "--out", str(tmp_path / "out"), "--dry-run", *TINY]
    trained = save_model(tmp_path / "tisa", position="tisa")
    line = fails(capsys, *arguments, "--model", trained)
    assert "--kernels: the model was pretrained with TISA, and its number of kernels can't change; use" in line
    main([*arguments, "--model", trained, "--position=own"])
    assert re.search(r"own +[0-9,]+ parameters", capsys.readouterr().out)
    main([*arguments, "--model", save_model(tmp_path / "learned")])
    out = capsys.readouterr().out
    assert re.search(r"learned +6,898 parameters, 640 of position *\n", out)
    assert re.search(r"learned\+tisa, S=2 +6,922 parameters, 664 of position, 24 of them new", out)
    main([*arguments, "--model", save_model(tmp_path / "t5", position="t5")])
    assert "640 of position, 640 of them new" in capsys.readouterr().out


def test_without_a_baseline_none_is_shown(model, data, tmp_path):
    results = run(model, data, tmp_path, "--position=rope,learned+tisa", "--kernels=2")
    assert results["shown"]["kernels"] == [2]
    table = (tmp_path / "results.md").read_text()
    assert "| task | metric | rope | gain | error reduction |" in table
    assert "baseline |" not in table


def test_errors_come_before_training_in_one_line(model, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finetune, "finetune_one", None)
    out = tmp_path / "out"

    def says(*options, task="cola", model=model):
        return fails(
            capsys, "finetune", "--model", model, "--data", data, "--task", task, f"--out={out}", *TINY, *options
        )

    assert "--task: expected sst2, mnli" in says(task="colla")
    assert f"--model: expected a folder with a config.json, got '{tmp_path}'" in says(model=str(tmp_path))
    config = tmp_path / "run" / "model" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_bytes((Path(model) / "config.json").read_bytes())
    assert f"; did you mean '{config.parent}'?" in says(model=str(config.parent.parent))
    assert "--model: no tokenizer can be read from" in says(model=str(config.parent))
    # transformers would make a billion names, before it looks at anything else.
    for count in (10**9, 1e9):
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_labels": count}))
        assert "num_labels: expected a" in says(model=str(config.parent))
    assert "--position: unknown position method 'tsia'; did you mean 'tisa'?" in says("--position=tsia")
    assert "--kernels: expected numbers from 0 to 1024 separated by commas, got 'a'" in says("--kernels=a")
    assert "--kernels: expected a number above 0 besides the baseline" in says("--kernels=0")
    assert "--epochs: expected a positive number, got 0" in says("--epochs=0")
    assert "--learning-rate: expected a positive number, got -1.0" in says("--learning-rate=-1")
    assert "--max-length: expected at least 4, got 3" in says("--max-length=3")
    assert "--seeds: expected" in says("--seeds=0")
    assert "--threads: expected" in says("--threads=0")
    bare = tmp_path / "bare"
    AutoTokenizer.from_pretrained(model).save_pretrained(bare)
    (bare / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "--model: expected" in says(model=str(bare))
    (bare / "config.json").write_text(json.dumps({"model_type": "bert", "position_embedding_type": "relative_key"}))
    assert "--model: position_embedding_type: expected 'absolute'" in says(model=str(bare))
    assert not (out / "results.json").exists()


def test_rows_that_are_too_long_are_an_error_or_cut(data, tmp_path, capsys):
    model = save_model(tmp_path / "model", max_length=10)
    arguments = ["finetune", "--model", model, "--data", data, "--task=mrpc", "--out", str(tmp_path / "out"), *TINY]
    line = fails(capsys, *arguments)
    assert "rows are longer than the 10 tokens that the model covers, the longest has" in line
    assert "set --max-length 10 to truncate them" in line
    assert "--max-length: " in fails(capsys, *arguments, "--max-length=11")
    main([*arguments, "--max-length=10"])
    assert "rows were truncated to 10 tokens" in capsys.readouterr().out
    assert "rows were truncated to 10 tokens" in (tmp_path / "out" / "results.md").read_text()
    # Methods that go on beyond what was trained need no cut.
    main([*arguments[: -len(TINY)], *TINY, "--position=tisa", "--out", str(tmp_path / "other")])


def test_another_models_tokenizer_is_refused(model, data, tmp_path, capsys):
    folder = tmp_path / "model"
    save_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"extra{number}" for number in range(9)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = ["--model", model, "--data", data, "--task=cola", "--out", str(tmp_path / "out"), *TINY]
    line = fails(capsys, "finetune", *arguments, "--tokenizer", str(tmp_path / "tokenizer"))
    assert "--tokenizer: it has ids up to" in line


def test_a_folder_of_something_else_is_refused(model, data, tmp_path, capsys):
    run(model, data, tmp_path)
    capsys.readouterr()
    arguments = ["finetune", "--model", model, "--data", data, "--task=cola", "--out", str(tmp_path), *TINY]
    assert "holds results with batch_size 8, not 4" in fails(capsys, *arguments, "--batch-size=4")
    assert "holds results for other rows of cola" in fails(capsys, *arguments, "--train-rows=8")
    other = save_model(tmp_path / "other", hidden_size=32)
    assert "holds results with weights" in fails(capsys, *arguments, "--model", other)
    assert "holds results with batch_size 8, not 4" in fails(capsys, *arguments, "--batch-size=4", "--dry-run")
    (tmp_path / "results.json").write_text('{"format": 1}')
    assert "is not a complete result of this command" in fails(capsys, *arguments)


def test_a_loss_that_is_no_number_stops_with_advice(model, data, tmp_path, capsys):
    arguments = ["finetune", "--model", model, "--data", data, "--task=cola", "--out", str(tmp_path), *TINY]
    assert "--learning-rate: " in fails(capsys, *arguments, "--learning-rate=1e30")
