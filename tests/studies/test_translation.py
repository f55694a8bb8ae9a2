"""Training translation end to end, at a size that takes seconds."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import whereformer
from tests.failing import fails, refusals
from tests.studies.parallel_text import TINY, pairs, train, write
from tests.studies.trainings import interrupt_at, same, weights, without_time
from whereformer import Seq2SeqForConditionalGeneration
from whereformer.cli.main import main
from whereformer.data import subwords
from whereformer.errors import InputError
from whereformer.lab.loading import quiet_transformers
from whereformer.lab.progress import Progress
from whereformer.lab.training.optimizer import build_schedule
from whereformer.studies.translate import parallel
from whereformer.studies.translate.examples import collate, prepare
from whereformer.studies.translate.model import build_config
from whereformer.studies.translate.pairs import open_text
from whereformer.studies.translate.settings import ParallelData, TranslationSettings
from whereformer.studies.translate.training import TranslatorTraining


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("text"), *pairs())


def run(data, out, *more):
    train(data, out, *more)
    return results_of(out)


def results_of(out):
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The folder of a finished run; to be left as it is."""
    out = tmp_path_factory.mktemp("finished")
    run(data, out)
    return out


def test_it_writes_model_tokenizer_and_results_and_says_how_to_go_on(data, tmp_path, capsys):
    results = run(data, tmp_path)
    out = capsys.readouterr().out
    assert results["finished"]
    assert [score["step"] for score in results["held_out"]] == [2, 4, 6]
    assert all(score["loss"] > 0 and 0 <= score["accuracy"] <= 1 for score in results["held_out"])
    assert results["text"]["training"]["pairs"] == 285
    assert results["text"]["held_out"]["pairs"] == 15
    assert results["parameters"] > results["embedding_parameters"] == results["text"]["vocabulary"] * 16
    assert results["positional_parameters"] == 2 * 2 * (2 * 16 + 1) * 8
    tokens = results["text"]["training"]["source_tokens"] + results["text"]["training"]["target_tokens"]
    assert results["tokens_seen"] == pytest.approx(results["epochs"] * tokens, abs=1)
    assert re.search("held-out +15 pairs", out)
    assert "mean of 2 checkpoints" in out
    assert f"whereformer translate run {tmp_path / 'model'}" in out
    assert not list(tmp_path.rglob("*.partial"))


def test_the_function_does_what_the_command_does(data, finished, tmp_path):
    sizes = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "encoder_layers": 1, "decoder_layers": 1}
    options = {"source": data[1], "target": data[3], **sizes, "vocab_size": 320, "batch_tokens": 256, "max_length": 60}
    options |= {"steps": 6, "every": 2, "warmup": 2, "average": 2, "learning_rate": 0.01, "quiet": True}
    results = whereformer.translate(**options, out=tmp_path)
    assert same(weights(tmp_path), weights(finished))
    assert without_time(results_of(tmp_path)) == without_time(results_of(finished))
    assert "(mean of 2 checkpoints)" in str(results)
    assert "285 pairs" in str(whereformer.translate(**options, out=tmp_path, dry_run=True))
    with pytest.raises(InputError, match=r"^data: expected Path|data: no such file"):
        whereformer.translate(out=tmp_path / "other", data=["no.jsonl"])


def test_what_is_saved_is_the_mean_of_the_last_checkpoints(data, tmp_path):
    results = run(data, tmp_path)
    assert results["averaged"]["steps"] == [4, 6]
    parts = [load_file(tmp_path / "checkpoints" / f"checkpoint-{step}" / "model.safetensors") for step in (4, 6)]
    for name, weight in weights(tmp_path).items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    assert isinstance(model, Seq2SeqForConditionalGeneration)
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert (model.generation_config.num_beams, model.generation_config.max_length) == (4, 60)
    # Its score by hand, without padding, from the saved model and the text.
    source, target = pairs()
    held_out = parallel.hold_out("source", [*zip(source, target, strict=True)])[1]
    loss = count = 0
    for one, other in held_out:
        labels = tokenizer(other, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss += float(model(tokenizer(one, return_tensors="pt")["input_ids"], labels=labels).loss) * labels.numel()
        count += labels.numel()
    assert results["averaged"]["loss"] == pytest.approx(loss / count, abs=1e-3)


def test_the_checkpoints_of_the_mean_are_kept_besides_the_last(data, tmp_path):
    results = run(data, tmp_path, "--average=3", "--every=1")
    assert results["averaged"]["steps"] == [4, 5, 6]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {f"checkpoint-{step}" for step in (4, 5, 6)}


def test_a_mean_without_one_of_its_checkpoints_is_made_again(data, finished, tmp_path, capsys):
    whole = results_of(shutil.copytree(finished, tmp_path, dirs_exist_ok=True))
    before = weights(tmp_path)
    shutil.rmtree(tmp_path / "model")
    with (tmp_path / "checkpoints" / "checkpoint-4" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    capsys.readouterr()
    again = run(data, tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "making model/ again: it is missing" in out
    assert "checkpoint-6: the average also needs checkpoint-4, but model.safetensors was changed" in out
    assert "Starting again from the first step" in out
    assert same(weights(tmp_path), before)
    assert without_time(again) == without_time(whole)


def test_one_checkpoint_is_taken_as_it_is(data, tmp_path):
    results = run(data, tmp_path, "--average=1")
    assert "averaged" not in results
    assert same(weights(tmp_path), load_file(tmp_path / "checkpoints" / "checkpoint-6" / "model.safetensors"))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["--dropout=0.2", "--accumulate=2", "--position=tisa+learned", "--norm=post"],
        ["--optimizer=muon", "--schedule=wsd"],
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(data, tmp_path, options):
    whole = run(data, tmp_path / "whole", *options)
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    # As after a crash behind step 4.
    shutil.rmtree(resumed / "model")
    shutil.rmtree(resumed / "checkpoints" / "checkpoint-6")
    again = run(data, resumed, *options)
    assert same(weights(tmp_path / "whole"), weights(resumed))
    assert without_time(whole) == without_time(again)


def test_ctrl_c_finishes_the_step_and_the_same_command_continues(data, tmp_path, capsys):
    whole = run(data, tmp_path / "whole", "--dropout=0.1")
    out = tmp_path / "stopped"
    interrupt_at(5, lambda: run(data, out, "--dropout=0.1"))
    assert "stopped after step 5" in capsys.readouterr().out
    again = run(data, out, "--dropout=0.1")
    assert "continuing after step 5 of 6" in capsys.readouterr().out
    # The checkpoint of step 5 is none of those that the model is the mean of.
    assert again["averaged"] == whole["averaged"]
    assert same(weights(tmp_path / "whole"), weights(out))


def test_a_finished_run_is_left_as_it_is_and_another_is_refused(data, tmp_path, capsys):
    run(data, tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    capsys.readouterr()
    run(data, tmp_path)
    assert "is already finished" in capsys.readouterr().out
    common = ["translate", "train", *data, "--out", str(tmp_path), *TINY]
    assert "holds results with norm 'pre', not 'post'" in fails(capsys, *common, "--norm=post")
    other = write(tmp_path, ["a b", "c d"] * 30, ["a b", "c d"] * 30)
    common = ["translate", "train", *other, "--out", str(tmp_path), *TINY]
    assert "holds results for a different text" in fails(capsys, *common)
    assert (tmp_path / "results.json").read_bytes() == before


def test_validation_of_its_own_and_tables(tmp_path, capsys):
    source, target = pairs()
    for name, rows in (("train", slice(20, None)), ("validation", slice(0, 20))):
        lines = zip(source[rows], target[rows], strict=True)
        text = "".join(json.dumps({"en": one, "xx": other}) + "\n" for one, other in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    data = ["--data", str(tmp_path / "train.jsonl"), "--columns=xx,en", "--validation"]
    data.append(str(tmp_path / "validation.jsonl"))
    results = run(data, tmp_path / "out", "--steps=2")
    assert results["text"]["training"]["pairs"] == 280
    assert results["text"]["held_out"]["pairs"] == 20


def test_empty_and_long_lines_are_left_out_and_counted(tmp_path, capsys):
    source, target = pairs()
    data = write(tmp_path, ["", *source, "the dog " * 80, "cat"], ["x", *target, "y", " "])
    results = run(data, tmp_path / "out", "--steps=1")
    counts = [results["text"][part] for part in ("training", "held_out")]
    assert sum(part["empty"] for part in counts) == 2
    assert sum(part["too_long"] for part in counts) == 1
    assert sum(part["pairs"] for part in counts) == len(source)
    assert max(part["longest"] for part in counts) <= 60
    assert "left out: " in capsys.readouterr().out


def test_a_dry_run_says_what_would_happen_and_writes_nothing(data, tmp_path, capsys):
    options = [option for option in TINY if not option.startswith("--steps")]
    main(["translate", "train", *data, "--out", str(tmp_path / "out"), *options, "--epochs=3", "--dry-run"])
    out = capsys.readouterr().out
    assert "read 3.0 times" in out
    assert "parameters" in out
    assert list(tmp_path.iterdir()) == []


def test_a_cache_is_shared_and_starting_again_reads_no_text(data, tmp_path, monkeypatch):
    for file in (data[1], data[3]):
        os.utime(file, (1e9, 1e9))
    options = [f"--cache={tmp_path / 'cache'}", "--steps=1"]
    first = run(data, tmp_path / "a", *options)

    def forbidden(*given):
        raise AssertionError("the text is read again")

    monkeypatch.setattr(subwords, "fit", forbidden)
    monkeypatch.setattr(parallel, "in_lots", forbidden)
    second = run(data, tmp_path / "b", *options)
    assert without_time(first) == without_time(second)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not (tmp_path / "a" / "cache").exists()
    # Lines that are too long for one run may be short enough for another.
    short = run(data, tmp_path / "c", *options, "--max-length=18")
    assert short["text"]["training"]["too_long"] > first["text"]["training"]["too_long"]


def test_epochs_are_passes_over_the_text(data, tmp_path):
    source, _ = pairs()
    files = ParallelData(source=Path(data[1]), target=Path(data[3]))
    opened = open_text(files, files, Progress())
    text = prepare(opened, 320, 60, tmp_path)
    for accumulate in (1, 3):
        given = {"batch_tokens": 256, "epochs": 2.0, "accumulate": accumulate, "max_length": 60}
        settings = TranslationSettings(**given, hidden_size=16, num_heads=2).checked()
        config = build_config(settings, len(text.tokenizer))
        job = TranslatorTraining(settings, text, config, torch.device("cpu"))
        assert job.course.epochs(job.course.steps) == pytest.approx(2, rel=0.1)
        assert len(job.batches()) == job.course.steps * accumulate
        rows = [row for batch in job.batches().batch_sampler for row in batch]
        assert sorted(rows[: len(source)]) == list(range(len(source)))


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


def test_mixed_precision_trains_and_keeps_float32_weights(data, tmp_path):
    half = run(data, tmp_path / "half", "--dtype=bfloat16")
    whole = run(data, tmp_path / "whole")
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path / "half").values())
    assert half["averaged"]["loss"] != whole["averaged"]["loss"]
    assert half["averaged"]["loss"] == pytest.approx(whole["averaged"]["loss"], abs=0.05)


def test_the_seed_decides(data, tmp_path):
    first = run(data, tmp_path / "a")
    other = run(data, tmp_path / "b", "--seed=1")
    assert first["losses"] != other["losses"]


def test_options_of_the_method_and_cross_attention(data, tmp_path):
    options = '--position-options={"clip": 3, "values": false}'
    run(data, tmp_path, "--position=shaw", options, "--cross-position=t5", "--steps=1")
    model = Seq2SeqForConditionalGeneration.from_pretrained(tmp_path / "model")
    assert model.config.position_options == {"clip": 3, "values": False}
    assert model.config.cross_position == "t5"


def test_transformers_own_trainer_takes_the_model_and_the_tokenizer(data, tmp_path):
    run(data, tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    source, target = pairs()
    rows = [tokenizer(one, text_target=other) for one, other in zip(source[:8], target[:8], strict=True)]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        predict_with_generate=True,
        generation_max_length=12,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        compute_metrics=lambda predicted: {"longest": int((predicted.predictions > 2).sum(1).max())},
    )
    with quiet_transformers():
        trainer.train()
        scores = trainer.evaluate()
    assert 0 < scores["eval_loss"] < 10
    assert 0 < scores["eval_longest"] <= 12


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--data: expected tables, or --source and --target, got none"),
        *refusals("""
        --position tsia => --position: unknown position method 'tsia'; did you mean 'tisa'?
        --position shaw --position-options '{"clip": "3"}' => --position-options: clip: expected a whole number, got '3'
        --position-options '[' => --position-options: expected a JSON object
        --cross-position tsia => --cross-position: unknown position method 'tsia'; did you mean 'tisa'?
        --cross-position t5+t5 => --cross-position: 't5+t5' names a method twice
        --num-heads 5 => --num-heads: 5 heads do not divide hidden_size 256
        --encoder-layers 0 => --encoder-layers: expected at least 1, got 0
        --dropout 1 => --dropout: expected 0 to 0.9, got 1.0
        --label-smoothing 1 => --label-smoothing: expected 0 to 0.9, got 1.0
        --vocab-size 256 => --vocab-size: expected at least 300, got 256
        --max-length 3 => --max-length: expected at least 4, got 3
        --batch-tokens 100 => --batch-tokens: expected at least 128, got 100
        --steps 5 --epochs 2 => --epochs: either --steps or --epochs
        --epochs 0 => --epochs: expected a positive number, got 0.0
        --steps 0 => --steps: expected at least 1, got 0
        --learning-rate nan => --learning-rate: expected a positive number, got nan
        --average 0 => --average: expected at least 1, got 0
        --threads 0 => --threads: expected 1 to 1024, got 0
        --source no.en --target no.de => --source: no such file: 'no.en'
        --source no.en => --target: expected a file to go with --source, got none
        --data no.jsonl => --data: no such file: 'no.jsonl'
    """),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2_before_the_text_is_encoded(
    arguments, expected, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(subwords, "fit", None)
    if not {"--source", "--data"} & {*arguments} and arguments:
        arguments = ["--data", "no.jsonl", *arguments]
    message = fails(capsys, "translate", "train", "--out", str(tmp_path / "out"), *arguments)
    assert expected in message


def test_text_of_which_nothing_fits(tmp_path, capsys):
    data = write(tmp_path, [f"{n} {n * 7} {n * 13}" for n in range(30)], [f"{n * 11} {n * 3} {n}" for n in range(30)])
    common = ["translate", "train", *data, "--out", str(tmp_path / "out"), *TINY, "--max-length=4", "--vocab-size=300"]
    message = fails(capsys, *common, "--batch-tokens=64")
    assert "--max-length: no held-out pair of" in message
    assert "at most 4 tokens" in message
