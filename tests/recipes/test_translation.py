"""Training translation end to end, at a size that takes seconds."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import whereformer
from tests.failing import fails, refusals
from tests.recipes.parallel_text import TINY, pairs, train, write
from tests.recipes.trainings import crash, results_of, same, stop_at, weights
from whereformer import Seq2SeqForConditionalGeneration
from whereformer.data import batches, parallel, subwords
from whereformer.data.parallel import collate
from whereformer.errors import InputError
from whereformer.lab.optimizer import build_schedule


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("text"), *pairs())


def run(data, out, *flags):
    train(data, out, *flags)
    return results_of(out)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The folder of a finished run; to be left as it is."""
    out = tmp_path_factory.mktemp("finished")
    run(data, out)
    return out


def test_it_writes_model_tokenizer_and_report_and_says_how_to_go_on(data, tmp_path, capsys):
    results = run(data, tmp_path)
    out = capsys.readouterr().out
    assert [step for step, _ in results["scores"]] == [2, 4, 6]
    assert all(score["loss"] > 0 and 0 <= score["accuracy"] <= 1 for _, score in results["scores"])
    assert [step for step, _ in results["losses"]] == [1, 2, 3, 4, 5, 6]
    assert results["training"]["pairs"] == 285
    assert results["held_out"]["pairs"] == 15
    assert results["positional_parameters"] == 2 * 2 * (2 * 16 + 1) * 8
    assert re.search("held-out +15 pairs", out)
    assert "mean of the weights at the last 2 scores" in " ".join(out.split())
    assert f"whereformer translate run {tmp_path / 'model'}" in " ".join(out.split())
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.rglob("*.partial"))


def test_the_function_does_what_the_command_does(data, finished, tmp_path):
    sizes = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "encoder_layers": 1, "decoder_layers": 1}
    options = {"data": data[1:], **sizes, "vocab_size": 320, "batch_tokens": 256, "max_length": 60}
    options |= {"steps": 6, "every": 2, "warmup": 2, "average": 2, "learning_rate": 0.01, "quiet": True}
    report = whereformer.translate(**options, out=tmp_path)
    assert same(weights(tmp_path), weights(finished))
    assert {**report.values, **report.values["about"]} == results_of(tmp_path) == results_of(finished)
    assert "(mean of the weights at the last 2 scores)" in str(report)
    epochs = {name: value for name, value in options.items() if name != "steps"} | {"epochs": 3}
    plan = str(whereformer.translate(**epochs, out=tmp_path / "none", dry_run=True))
    assert "285 pairs" in plan
    assert "read 3.0 times" in " ".join(plan.split())
    assert not (tmp_path / "none").exists()
    with pytest.raises(InputError, match="data: no such file"):
        whereformer.translate(out=tmp_path / "other", data=["no.jsonl"])


def test_what_is_saved_is_the_mean_of_the_last_scored_weights(data, finished, tmp_path):
    results = results_of(finished)
    assert results["averaged_steps"] == [4, 6]
    for step in (4, 6):  # the schedule does not depend on the number of steps
        run(data, tmp_path / str(step), f"--steps={step}", "--average=1")
    parts = [weights(tmp_path / str(step)) for step in (4, 6)]
    for name, weight in weights(finished).items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2)
    model = AutoModelForSeq2SeqLM.from_pretrained(finished / "model").eval()
    assert isinstance(model, Seq2SeqForConditionalGeneration)
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert (model.generation_config.num_beams, model.generation_config.max_length) == (4, 60)
    # Its score by hand, without padding, from the saved model and the text.
    held_out = parallel.Pairs("data", tuple(map(Path, data[1:])), held_out=True)
    loss = count = 0
    for text, target in held_out:
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss += float(model(tokenizer(text, return_tensors="pt")["input_ids"], labels=labels).loss) * labels.numel()
        count += labels.numel()
    assert results["saved"]["loss"] == pytest.approx(loss / count, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        ["--dropout=0.2", "--accumulate=2", "--position=tisa+learned", "--norm=post", "--average=3"],
        ["--schedule=cosine"],
    ],
)
def test_a_killed_run_is_the_uninterrupted_one_to_the_bit(data, tmp_path, options, capsys):
    unbroken = run(data, tmp_path / "whole", *options)
    stop_at(batches.RandomBatches.__call__, 6, crash, lambda: run(data, tmp_path / "killed", *options))
    again = run(data, tmp_path / "killed", *options)
    assert "continuing after step 4 of 6" in capsys.readouterr().out
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert unbroken == again


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(data, tmp_path):
    # One long pair fills a batch, and the second process has nothing to read.
    for name, flags in {"parts": ["--accumulate=2"], "single": ["--batch-tokens=60"]}.items():
        options = [*data, *TINY, "--dropout=0", "--device=cpu", "--report-to=none", *flags]
        run(data, tmp_path / name, "--dropout=0", "--report-to=none", *flags)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        command += ["whereformer", "translate", "train", *options, "--out", str(tmp_path / f"{name}-two")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr
        # Not the weights: the gradient of keys' biases is noise, of which Adam makes steps.
        one, two = (results_of(tmp_path / folder) for folder in (name, f"{name}-two"))
        for (step, loss), pair in zip(one["losses"], two["losses"], strict=True):
            assert pair == [step, pytest.approx(loss, abs=1e-5)]
        for (step, scores), pair in zip(one["scores"], two["scores"], strict=True):
            assert pair == [step, pytest.approx(scores, abs=1e-5)]


def test_a_finished_run_is_left_as_it_is_and_another_is_refused(data, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = results_of(tmp_path)
    run(data, tmp_path)
    assert "1 of 1 runs are already done" in capsys.readouterr().out
    common = ["translate", "train", *data, "--out", str(tmp_path), *TINY]
    assert "has results with norm 'pre', not 'post'" in fails(capsys, *common, "--norm=post")
    other_data = write(tmp_path, ["a b", "c d"] * 30, ["a b", "c d"] * 30)
    common = ["translate", "train", *other_data, "--out", str(tmp_path), *TINY]
    assert "has results for a different text" in fails(capsys, *common)
    assert results_of(tmp_path) == before


def test_validation_of_its_own_and_tables(tmp_path, capsys):
    source, target = pairs()
    for name, rows in (("train", slice(20, None)), ("validation", slice(0, 20))):
        lines = zip(source[rows], target[rows], strict=True)
        text = "".join(json.dumps({"en": first, "xx": second}) + "\n" for first, second in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    data = ["--data", str(tmp_path / "train.jsonl"), "--columns=xx,en", "--validation"]
    data.append(str(tmp_path / "validation.jsonl"))
    results = run(data, tmp_path / "out", "--steps=2")
    assert results["training"]["pairs"] == 280
    assert results["held_out"]["pairs"] == 20


def test_empty_and_long_lines_are_left_out_and_counted(tmp_path, capsys):
    source, target = pairs()
    data = write(tmp_path, ["", *source, "the dog " * 80, "cat"], ["x", *target, "y", " "])
    results = run(data, tmp_path / "out", "--steps=1")
    counts = [results[part] for part in ("training", "held_out")]
    assert sum(part["empty"] for part in counts) == 2
    assert sum(part["too_long"] for part in counts) == 1
    assert sum(part["pairs"] for part in counts) == len(source)
    assert max(part["longest"] for part in counts) <= 60
    assert "left out: " in capsys.readouterr().out


def test_a_cache_is_shared_and_starting_again_reads_no_text(data, tmp_path, monkeypatch):
    for file in data[1:]:
        os.utime(file, (1e9, 1e9))
    options = [f"--cache={tmp_path / 'cache'}", "--steps=1"]
    first = run(data, tmp_path / "a", *options)

    def forbidden(*arguments):
        raise AssertionError("the text is read again")

    monkeypatch.setattr(subwords, "fit", forbidden)
    monkeypatch.setattr(parallel, "iter_chunks", forbidden)
    second = run(data, tmp_path / "b", *options)
    assert first == second
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not (tmp_path / "a" / "cache").exists()
    # Lines that are too long for one run may be short enough for another.
    short = run(data, tmp_path / "c", *options, "--max-length=18")
    assert short["training"]["too_long"] > first["training"]["too_long"]


def test_a_batch_has_no_mask_where_nothing_is_padded():
    long, short = torch.tensor([5, 6, 2]), torch.tensor([7, 2])
    assert "attention_mask" not in collate([(long, short), (long, long)])
    batch = collate([(short, long), (long, short)])
    assert batch["input_ids"].tolist() == [[7, 2, 0], [5, 6, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, 2], [7, 2, -100]]


def test_the_schedule_is_the_papers():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=512**-0.5 * 4000**-0.5)
    schedule = build_schedule(optimizer, "inverse_sqrt", 4000, 10_000)
    for step in (1, 2, 3999, 4000, 4001, 9000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert schedule.base_lrs[0] * schedule.lr_lambdas[0](step - 1) == pytest.approx(expected)


def test_options_of_the_method(data, tmp_path):
    options = '--position-options={"clip": 3, "values": false}'
    run(data, tmp_path, "--position=shaw", options, "--steps=1")
    model = Seq2SeqForConditionalGeneration.from_pretrained(tmp_path / "model")
    assert model.config.position_options == {"clip": 3, "values": False}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--data: expected .csv, .tsv, .jsonl, .ndjson, .parquet, .arrow files, or two files of lines, got none"),
        *refusals("""
        --position tsia => --position: unknown position method 'tsia'; did you mean 'tisa'?
        --position shaw --position-options '{"clip": "3"}' => --position-options: clip: expected an integer, got '3'
        --position-options '[' => --position-options: expected a JSON object
        --num-heads 5 => --num-heads: 5 heads do not divide hidden_size 256
        --batch-tokens 100 => --batch-tokens: expected at least 128, got 100
        --data no.en no.de => --data: no such file: 'no.en'
        --data no.en => --data: expected .csv, .tsv, .jsonl, .ndjson, .parquet, .arrow files, or two files of lines, got
        --data no.jsonl => --data: no such file: 'no.jsonl'
    """),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2_before_the_text_is_encoded(
    arguments, expected, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(subwords, "fit", None)
    if "--data" not in arguments and arguments:
        arguments = ["--data", "no.jsonl", *arguments]
    assert expected in fails(capsys, "translate", "train", "--out", str(tmp_path / "out"), *arguments)


def test_text_of_which_nothing_fits(tmp_path, capsys):
    data = write(tmp_path, [f"{n} {n * 7} {n * 13}" for n in range(30)], [f"{n * 11} {n * 3} {n}" for n in range(30)])
    common = ["translate", "train", *data, "--out", str(tmp_path / "out"), *TINY, "--max-length=4", "--vocab-size=300"]
    message = fails(capsys, *common, "--batch-tokens=64")
    assert "--max-length: no held-out pair of" in message
    assert "at most 4 tokens" in message
