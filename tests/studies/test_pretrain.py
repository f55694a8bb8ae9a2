"""Pretraining end to end, at a size that takes seconds."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

import whereformer
from tests.failing import fails, largest_file, refusals
from tests.studies.trainings import TINY_ENCODER, interrupt_at, same, toy_tracker, weights, without_time
from whereformer import Electra, Encoder, EncoderConfig, EncoderForMaskedLM, EncoderForPreTraining
from whereformer.analysis import cost
from whereformer.cli.main import main
from whereformer.data import encode as caches
from whereformer.data.corpus import Text
from whereformer.data.encode import TokenizerChoice, open_or_encode
from whereformer.data.tokenizers import train_tokenizer
from whereformer.data.windows import Windows, body_length, collate, end_padding
from whereformer.errors import InputError
from whereformer.kernels import torch_private
from whereformer.lab import manifest, options, trackers
from whereformer.lab.training import long_run
from whereformer.lab.training.folder import Folder
from whereformer.lab.training.long_run import LongTrainer
from whereformer.studies.pretrain import pretraining
from whereformer.studies.pretrain.results import PretrainResults
from whereformer.studies.pretrain.schedule import Stage, StagedBatches
from whereformer.studies.pretrain.settings import PretrainTraining

TINY = [*TINY_ENCODER, "--every=2", "--learning-rate=0.01"]


@pytest.fixture(scope="module", autouse=True)
def _judged_on_little_text():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pretraining, "HELD_OUT_WINDOWS", 16)
        yield


def run(text, out, *more):
    main(["pretrain", "--data", text, "--out", str(out), *TINY, *more])
    return results_of(out)


def results_of(out):
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The folder of a finished run; to be left as it is."""
    out = tmp_path_factory.mktemp("finished")
    run(text, out)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of it to change."""
    return shutil.copytree(finished, tmp_path / "copy")


def test_it_writes_model_tokenizer_and_results_and_says_how_to_use_them(text, tmp_path, capsys):
    results = run(text, tmp_path)
    out = capsys.readouterr().out
    assert results["finished"]
    assert [loss["step"] for loss in results["losses"]] == [1, 2, 3, 4, 5, 6]
    assert [score["step"] for score in results["held_out"]] == [2, 4, 6]
    assert all(score["loss"] > 0 and 0 <= score["accuracy"] <= 1 for score in results["held_out"])
    assert results["tokens_seen"] == 6 * 4 * 16
    assert results["parameters"] > results["embedding_parameters"] > results["positional_parameters"] == 30
    assert results["seconds"] > 0
    assert results["settings"]["warmup"] == 1
    assert "step 6: held-out loss" in out
    snippet = out[out.index("from transformers import") :]
    namespace = {}
    exec(snippet, namespace)
    assert namespace["hidden"].shape[-1] == 16
    assert not list(tmp_path.glob("*.partial"))


def test_the_function_does_what_the_command_does(text, finished, tmp_path):
    sizes = {"length": 16, "hidden_size": 16, "num_heads": 2, "blocks": "1", "vocab_size": 64, "batch_size": 4}
    options = {"data": text, **sizes, "steps": 6, "every": 2, "learning_rate": 0.01, "quiet": True}
    results = whereformer.pretrain(**options, out=tmp_path / "out")
    assert same(weights(tmp_path / "out"), weights(finished))
    assert without_time(results_of(tmp_path / "out")) == without_time(results_of(finished))
    assert "6 steps, 384 tokens in " in str(results)
    assert [path.name for path in results.save(tmp_path / "saved")] == ["results.json"]
    plan = whereformer.pretrain(**options, out=tmp_path / "out", dry_run=True)
    assert "6 steps of 64 tokens" in str(plan)
    assert "<table" in plan._repr_html_()
    with pytest.raises(InputError, match=r"^out: expected a folder for the model, got None"):
        whereformer.pretrain()


def test_what_is_saved_is_what_was_trained(text, finished):
    model = AutoModelForMaskedLM.from_pretrained(finished / "model")
    assert isinstance(model, EncoderForMaskedLM)
    assert isinstance(Encoder.from_pretrained(finished / "model"), Encoder)
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert model(**tokenizer("the cat", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
    assert same(weights(finished), load_file(finished / "checkpoints" / "checkpoint-6" / "model.safetensors"))
    # The score by hand, from the saved model and the text.
    windows = held_out_windows(text, finished)
    batch = collate([windows[row] for row in range(len(windows))])
    with torch.no_grad():
        score = float(model.eval()(**batch).loss)
    assert results_of(finished)["held_out"][-1]["loss"] == pytest.approx(score, abs=1e-3)


def test_the_loss_falls_below_guessing_by_frequency(text, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "HELD_OUT_WINDOWS", 1000)
    results = run(text, tmp_path, "--steps=150", "--every=150", "--batch-size=16")
    assert results["held_out"][-1]["loss"] < results["text"]["unigram_entropy"] - 0.3
    assert results["losses"][-1]["loss"] < results["losses"][0]["loss"] - 0.5


ELECTRA = ["--objective=electra", "--num-heads=4", "--dropout=0.1"]
FUNNEL = ["--blocks=1-1x2", "--decoder-layers=1"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["--dropout=0.2", "--accumulate=2", "--hide-masked"],
        pytest.param(ELECTRA, marks=pytest.mark.slow),
        pytest.param(FUNNEL, marks=pytest.mark.slow),
        [*ELECTRA, *FUNNEL],
        ["--optimizer=muon", "--schedule=wsd"],
        ["--optimizer=stable_adamw", "--schedule=cosine"],
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(text, tmp_path, options):
    whole = run(text, tmp_path / "whole", *options)
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    # As after a crash behind step 4: no model, nothing that was kept later.
    shutil.rmtree(resumed / "model")
    shutil.rmtree(resumed / "checkpoints" / "checkpoint-6")
    again = run(text, resumed, *options)
    assert same(weights(tmp_path / "whole"), weights(resumed))
    assert without_time(whole) == without_time(again)
    state = [torch.load(out / "checkpoints" / "checkpoint-6" / "optimizer.pt") for out in (tmp_path / "whole", resumed)]
    for slot, moments in state[0]["state"].items():
        again = state[1]["state"][slot]
        assert all(torch.equal(*map(torch.as_tensor, (value, again[name]))) for name, value in moments.items())


def test_electra_keeps_its_discriminator(text, tmp_path, capsys):
    results = run(text, tmp_path, *ELECTRA)
    scores = results["held_out"][-1]
    assert {"loss", "generator_loss", "discriminator_loss", "accuracy"} <= scores.keys()
    weight = results["settings"]["discriminator_weight"]
    assert scores["loss"] == pytest.approx(scores["generator_loss"] + weight * scores["discriminator_loss"], abs=0.01)
    model, loading = EncoderForPreTraining.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.config.hidden_size == 16
    joint = load_file(tmp_path / "checkpoints" / "checkpoint-6" / "model.safetensors")
    assert any(name.startswith("generator.") for name in joint)
    kept = weights(tmp_path)
    assert all(torch.equal(weight, joint[f"discriminator.{name}"]) for name, weight in kept.items())
    assert results["parameters"] > sum(parameter.numel() for parameter in model.parameters())
    assert "generator loss" in capsys.readouterr().out


def held_out_windows(text, out, padding=0, *, uniforms=False):
    """As pretraining at TINY's sizes scores them, and the tokens of text in each."""
    prepared = open_or_encode(out / "cache", Text([text]), TokenizerChoice(None, 64))
    body = body_length(16, padding)
    return Windows(
        prepared.held_out,
        prepared.vocabulary,
        length=16,
        padding=padding,
        rate=0.15,
        hide_masked=False,
        rows=range(min(pretraining.HELD_OUT_WINDOWS, len(prepared.held_out) // body)),
        seed=0,
        shuffled=False,
        uniforms=uniforms,
    )


@pytest.mark.parametrize(("blocks", "padding"), [pytest.param("1", 0, marks=pytest.mark.slow), ("1-1-1", 3)])
def test_electras_scores_are_over_all_held_out_tokens_and_not_means_of_batches(text, tmp_path, blocks, padding):
    # A discriminator that has learnt little is right about some of the replaced tokens.
    results = run(text, tmp_path, *ELECTRA, f"--blocks={blocks}", "--learning-rate=1e-5")
    model = Electra.from_pretrained(tmp_path / "checkpoints" / "checkpoint-6").eval()
    chances, judged, found = [], [], []
    for batch in DataLoader(held_out_windows(text, tmp_path, padding, uniforms=True), batch_size=4, collate_fn=collate):
        with torch.no_grad():
            out = model(**batch)
        wanted = batch["labels"] != -100
        chances.append(out.generator_logits.log_softmax(-1).gather(1, batch["labels"][wanted][:, None]))
        replaced = wanted & (out.sampled_ids != batch["labels"])
        right = torch.where(replaced, -out.discriminator_logits, out.discriminator_logits)
        judged.append(right[:, : 16 - padding].flatten())
        found.append(right[replaced])
    chances, judged, found = (torch.cat(parts) for parts in (chances, judged, found))
    scores = results["held_out"][-1]
    assert scores["generator_loss"] == pytest.approx(float(-chances.mean()), abs=1e-4)
    assert scores["discriminator_loss"] == pytest.approx(float(-judged.sigmoid().log().mean()), abs=1e-4)
    assert scores["accuracy"] == pytest.approx(float((judged > 0).float().mean()), abs=1e-4)
    assert scores["replaced_recall"] == pytest.approx(float((found >= 0).float().mean()), abs=1e-4)
    assert 0 < scores["replaced_recall"] < 1


def test_a_funnel_ends_its_windows_with_what_truncation_drops(text, tmp_path, capsys):
    results = run(text, tmp_path, "--blocks=1-1-1")
    assert results["settings"]["decoder_layers"] == "2"
    assert results["block_lengths"] == [16, 8, 4]
    assert results["tokens_seen"] == 6 * 4 * 13
    assert "blocks 1-1-1 of 16, 8, 4 tokens" in capsys.readouterr().out
    model = EncoderForMaskedLM.from_pretrained(tmp_path / "model")
    assert model(torch.full((1, 16), 9)).logits.shape[1] == 16


def test_ctrl_c_finishes_the_step_and_the_same_command_continues(text, tmp_path, capsys, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    whole = run(text, tmp_path / "whole", "--dropout=0.1")
    out = tmp_path / "stopped"
    # The clock goes on by a minute at each look in the run that is interrupted, and by a second in the other one.
    clock, tick = [0.0], [60.0]

    def perf_counter():
        clock[0] += tick[0]
        return clock[0]

    monkeypatch.setattr(long_run, "time", SimpleNamespace(perf_counter=perf_counter))
    interrupt_at(3, lambda: run(text, out, "--dropout=0.1"))
    captured = capsys.readouterr()
    assert "the same command continues" in captured.err
    assert "stopped after step 3" in captured.out
    kept = json.loads((out / "results.json").read_text())
    assert (kept["step"], kept["finished"]) == (3, False)
    assert signal.getsignal(signal.SIGINT) is before
    tick[0] = 1.0
    again = run(text, out, "--dropout=0.1")
    assert "continuing after step 3 of 6" in capsys.readouterr().out
    assert same(weights(tmp_path / "whole"), weights(out))
    assert without_time(again) == without_time(whole)
    assert again["seconds"] > kept["seconds"] > 60


def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_checkpoint(text, tmp_path):
    interrupt_at(4, lambda: run(text, tmp_path), times=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert run(text, tmp_path)["step"] == 6


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def edit_step(file):
    file.write_text(file.read_text().replace('"global_step": 6', '"global_step": 5'))


NEWEST = "checkpoints/checkpoint-6"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        *(
            (lambda out, name=name: (out / NEWEST / name).unlink(), f"{name} is missing")
            for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json")
        ),
        (lambda out: (out / NEWEST / "manifest.json").unlink(), "it has no manifest"),
        (lambda out: (out / NEWEST / "manifest.json").write_text('{"format": 1'), "its manifest.json cannot be read"),
        (lambda out: flip(out / NEWEST / "model.safetensors"), "model.safetensors was changed"),
        (lambda out: flip(out / NEWEST / "optimizer.pt"), "optimizer.pt was changed"),
        (lambda out: os.truncate(out / NEWEST / "rng_state.pth", 100), "rng_state.pth was changed"),
        (lambda out: os.truncate(out / NEWEST / "trainer_state.json", 0), "trainer_state.json was changed"),
        (lambda out: edit_step(out / NEWEST / "trainer_state.json"), "trainer_state.json was changed"),
        (
            lambda out: swap(*(out / "checkpoints" / f"checkpoint-{step}" / "model.safetensors" for step in (4, 6))),
            "checkpoint-6: model.safetensors was changed; checkpoint-4: model.safetensors was changed",
        ),
        (
            lambda out: shutil.copytree(out / "checkpoints" / "checkpoint-4", out / NEWEST, dirs_exist_ok=True),
            "it was saved with other step",
        ),
        (lambda out: (out / NEWEST / "optimizer.bin").write_bytes(b""), "it has a .bin file, a pickle"),
        (lambda out: (out / NEWEST / "adapter_model.safetensors").write_bytes(b""), "does not belong to it"),
    ],
)
def test_a_checkpoint_counts_only_as_it_was_saved(copy, damage, reason):
    damage(copy)
    folder = Folder(copy, results_of(copy)["settings"], PretrainResults)
    found = folder.newest_checkpoint()
    passed = "; ".join(f"{name}: {why}" for name, why in folder.passed_over.items())
    assert reason in passed
    assert passed.startswith("checkpoint-6: ")
    assert found == (None if "checkpoint-4" in passed else copy / "checkpoints" / "checkpoint-4")


def test_a_checkpoint_of_other_settings_does_not_count(copy):
    settings = results_of(copy)["settings"]
    (copy / "results.json").unlink()
    folder = Folder(copy, {**settings, "seed": 1}, PretrainResults)
    assert folder.newest_checkpoint() is None
    assert folder.passed_over["checkpoint-6"] == "it was saved with other settings"
    again = Folder(copy, settings, PretrainResults)
    assert again.newest_checkpoint() == copy / NEWEST


def altered(file, change):
    """Change what a file of a checkpoint holds, as somebody would who knows its format."""
    if file.suffix == ".json":
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    else:
        torch.save(change, file)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("optimizer.pt", {}),
        ("scaler.pt", {"scale": 1.0}),
        ("trainer_state.json", {"stateful_callbacks": [3]}),
        ("trainer_state.json", {"log_history": 3}),
    ],
)
def test_a_checkpoint_that_fits_its_manifest_but_does_not_load_is_refused(name, change, text, finished, copy, capsys):
    for name_of in ("model", NEWEST):
        shutil.rmtree(copy / name_of)
    place = copy / "checkpoints" / "checkpoint-4"
    altered(place / name, change)
    manifest.write(place, {"step": 4, "settings": results_of(copy)["settings"]})
    line = fails(capsys, "pretrain", "--data", text, "--out", str(copy), *TINY)
    assert line.startswith(f"whereformer: --out: {place} does not load (")
    assert line.endswith("; delete it, then the same command continues without it")
    shutil.rmtree(place)
    assert without_time(run(text, copy)) == without_time(results_of(finished))


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_with_the_same_bits(text, finished, copy, capsys):
    shutil.rmtree(copy / "model")
    flip(copy / NEWEST / "model.safetensors")
    again = run(text, copy)
    out = capsys.readouterr().out
    assert "making model/ again: it is missing" in out
    assert "passing over checkpoint-6: model.safetensors was changed" in out
    assert "continuing after step 4 of 6" in out
    assert same(weights(copy), weights(finished))
    assert without_time(again) == without_time(results_of(finished))
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_without_any_checkpoint_that_counts_the_run_starts_again(text, finished, copy, capsys):
    shutil.rmtree(copy / "model")
    for step in (4, 6):
        (copy / "checkpoints" / f"checkpoint-{step}" / "manifest.json").unlink()
    again = run(text, copy)
    out = " ".join(capsys.readouterr().out.split())
    assert "checkpoint-4: it has no manifest. Starting again" in out
    assert "continuing after" not in out
    assert same(weights(copy), weights(finished))
    assert without_time(again) == without_time(results_of(finished))


def test_old_checkpoints_go_only_when_newer_ones_count(text, tmp_path):
    run(text, tmp_path, "--every=1", "--keep=3")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    for name in ("model", "checkpoints/checkpoint-6"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "checkpoints" / "checkpoint-5" / "optimizer.pt").unlink()
    run(text, tmp_path, "--every=2", "--keep=2")
    # The damaged one is no longer needed, and is none of the two.
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model/model.safetensors", "making model/ again: model.safetensors was changed"),
        ("model/tokenizer.json", "making model/ again: tokenizer.json was changed"),
    ],
)
def test_a_finished_run_is_finished_only_if_all_of_it_is_there(text, finished, copy, capsys, name, reason):
    os.truncate(copy / name, 7)
    again = run(text, copy)
    out = capsys.readouterr().out
    assert reason in out
    assert "is already finished" not in out
    assert same(weights(copy), weights(finished))
    assert without_time(again) == without_time(results_of(finished))


def test_damaged_results_are_refused_and_written_again_once_they_are_moved_away(text, finished, copy, capsys):
    os.truncate(copy / "results.json", 7)
    before = (copy / "results.json").read_bytes()
    line = fails(capsys, "pretrain", "--data", text, "--out", str(copy), *TINY)
    assert "results.json is not a complete result of this command" in line
    assert (copy / "results.json").read_bytes() == before
    (copy / "results.json").unlink()
    assert without_time(run(text, copy)) == without_time(results_of(finished))
    assert "continuing after step 6 of 6" in capsys.readouterr().out
    assert same(weights(copy), weights(finished))


def test_a_run_through_a_link_is_that_of_the_folder(text, finished, copy, tmp_path, capsys):
    (tmp_path / "link").symlink_to(copy)
    shutil.rmtree(copy / "model")
    run(text, tmp_path / "link")
    assert same(weights(copy), weights(finished))
    run(text, copy)
    assert "is already finished" in capsys.readouterr().out
    assert (tmp_path / "link").is_symlink()


def test_the_bytes_of_a_model_are_read_once(text, copy, monkeypatch):
    (copy / "model" / "tokenizer.json").write_text("{}")
    real, read = manifest.describe, []

    def describe(path):
        read.append(path)
        return real(path)

    monkeypatch.setattr(manifest, "describe", describe)
    run(text, copy)
    assert read.count(copy / "model" / "model.safetensors") == 1
    assert results_of(copy)["finished"]


def test_a_model_card_may_be_edited(text, copy, capsys):
    (copy / "model" / "README.md").write_text("my model")
    run(text, copy)
    assert "is already finished" in capsys.readouterr().out


def test_a_resume_opens_pickles_only_for_their_tensors(text, copy, monkeypatch):
    for name in ("model", NEWEST):
        shutil.rmtree(copy / name)
    real, opened = torch.load, []

    def load(file, *arguments, **options):
        opened.append((Path(file).name, options.get("weights_only")))
        return real(file, *arguments, **options)

    monkeypatch.setattr(torch, "load", load)
    run(text, copy)
    assert sorted(opened) == [(name, True) for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt")]
    assert not list(copy.rglob("*.bin"))


@pytest.mark.parametrize(
    "limit", [8_000, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (1_000, 20_000, 30_000))]
)
def test_on_a_full_disk_one_line_says_what_to_do_and_the_same_command_continues(
    text, finished, tmp_path, capsys, limit
):
    """A limit on the size of files stands for the disk: the errors differ only in their number."""
    with largest_file(limit):
        message = fails(capsys, "pretrain", "--data", text, "--out", str(tmp_path), *TINY)
    assert f"cannot write {tmp_path}" in message
    assert message.endswith("; make room, then run the same command again")
    assert not list(tmp_path.rglob("*.partial"))
    run(text, tmp_path)
    assert same(weights(tmp_path), weights(finished))


def test_a_finished_run_is_left_as_it_is(text, copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock" and path.is_file()}
    run(text, copy)
    out = capsys.readouterr().out
    assert "is already finished" in out
    assert "Encoder.from_pretrained" in out
    after = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock" and path.is_file()}
    assert after == before


def test_other_settings_do_not_mix_with_a_run_already_there(text, finished, capsys):
    before = (finished / "results.json").read_bytes()
    common = ["pretrain", "--data", text, "--out", str(finished), *TINY]
    assert "holds results with hidden_size 16, not 32" in fails(capsys, *common, "--hidden-size=32")
    assert "holds results with seed 0, not 1" in fails(capsys, *common, "--seed=1")
    assert "holds results with optimizer 'adamw', not 'muon'" in fails(capsys, *common, "--optimizer=muon")
    assert "holds results with schedule 'linear', not 'wsd'" in fails(capsys, *common, "--schedule=wsd")
    tokenizer = finished / "model"
    without_size = [option for option in common if not option.startswith("--vocab-size")]
    assert "holds results with tokenizer" in fails(capsys, *without_size, "--tokenizer", str(tokenizer))
    assert (finished / "results.json").read_bytes() == before


def test_a_dry_run_says_what_would_happen_and_writes_nothing(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["pretrain", "--data", text, "--out", str(tmp_path / "out"), *TINY, "--dry-run"])
    out = capsys.readouterr().out
    assert "parameters" in out
    assert "bfloat16" not in out
    assert "A dry run: nothing was trained or written." in out
    assert "6 steps of 64 tokens" in out
    assert "blocks 1 of 16 tokens" in out
    assert "FLOPs a batch" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fast", [False, True])
def test_bfloat16_on_a_processor_without_it_leaves_a_note(text, tmp_path, capsys, monkeypatch, fast):
    monkeypatch.setattr(torch_private, "multiplies_bfloat16", lambda: fast)
    main(["pretrain", "--data", text, "--out", str(tmp_path / "out"), *TINY, "--dtype=bfloat16", "--dry-run"])
    assert ("--dtype float32 is much faster here" in capsys.readouterr().out) == (not fast)


@pytest.mark.parametrize("objective", ["mlm", pytest.param("electra", marks=pytest.mark.slow)])
def test_a_methods_options_and_narrow_embeddings_are_trained_saved_and_counted(text, tmp_path, capsys, objective):
    options = ["--position=tisa+fire", '--position-options={"width": 6, "initial_threshold": 8, "num_kernels": 2}']
    options += ["--embedding-size=4", "--objective", objective]
    results = run(text, tmp_path, *options)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.position_options == {"num_kernels": 2, "width": 6, "initial_threshold": 8}
    assert config.embedding_size == 4
    assert results["embedding_parameters"] == 64 * 4
    saved = weights(tmp_path)
    assert saved["encoder.position.parts.0.amplitude"].shape == (1, 2, 2)
    assert saved["encoder.embeddings.projection.weight"].shape == (16, 4)
    # The same said otherwise goes on; other options don't.
    options[1] = '--position-options={"num_kernels": 2, "initial_threshold": 8,"width":6}'
    assert run(text, tmp_path, *options) == results
    options[1] = '--position-options={"num_kernels": 3}'
    message = fails(capsys, "pretrain", "--data", text, "--out", str(tmp_path), *TINY, *options)
    assert "holds results with position_options" in message


@pytest.mark.parametrize("objective", [pytest.param("mlm", marks=pytest.mark.slow), "electra"])
def test_windows_are_trained_saved_and_told(text, tmp_path, objective):
    results = run(text, tmp_path, "--windows=2,0", "--blocks=2", "--objective", objective)
    assert results["settings"]["windows"] == "2,0"
    assert "| windows | `2,0` |" in (tmp_path / "model" / "README.md").read_text()
    encoder = Encoder.from_pretrained(tmp_path / "model").eval()
    first, second = encoder(torch.arange(5, 15)[None], output_attentions=True).attentions
    assert int(first[0, 0, 5].count_nonzero()) == 5
    assert int(second[0, 0, 5].count_nonzero()) == 10


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--preset=modernbert", "--blocks=2"],
            {"windows": "0,64", "feed_forward": "gated", "norm": "pre", "first_norm": False, "position": "rope"},
        ),
        pytest.param(
            ["--preset=modernbert", "--blocks=3", "--windows=2", "--position=tisa", "--norm=pre"],
            {"windows": "2", "biases": False, "position": "tisa", "position_options": {}},
            marks=pytest.mark.slow,
        ),
        (["--preset=funnel", "--blocks=1-1"], {"query_bias": False, "type_vocab_size": 0, "decoder_layers": "2"}),
        (["--preset=albert", "--blocks=1x2"], {"norm": "post", "hidden_act": "gelu_pytorch_tanh", "blocks": "1x2"}),
    ],
    ids=str,
)
def test_a_preset_is_trained_and_told(text, tmp_path, words, expected):
    results = run(text, tmp_path, *words)
    assert results["settings"]["preset"] == words[0].partition("=")[2]
    config = Encoder.from_pretrained(tmp_path / "model").config
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.hidden_dropout_prob == 0.0


def test_a_dry_run_counts_a_methods_options_and_narrow_embeddings(text, tmp_path, capsys):
    common = ["pretrain", "--data", text, "--out", str(tmp_path / "out"), *TINY, "--dry-run"]
    main([*common, '--position-options={"num_kernels": 100}', "--embedding-size=4"])
    config = EncoderConfig(
        vocab_size=64,
        hidden_size=16,
        embedding_size=4,
        num_attention_heads=2,
        blocks="1",
        position="tisa",
        position_options={"num_kernels": 100},
        type_vocab_size=0,
        norm="pre",
        sparse_prediction=True,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    costs = str(cost(config, 16, 4, predictions=2))
    assert " ".join(costs.split()) in " ".join(capsys.readouterr().out.split())


def test_parameters_are_counted_without_memory_for_them(text, tmp_path):
    results = run(text, tmp_path, "--position=learned+t5")
    model = EncoderForMaskedLM.from_pretrained(tmp_path / "model")
    assert results["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert results["positional_parameters"] == 16 * 16 + 32 * 2


def test_another_tokenizer(text, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(train_tokenizer(["the cat saw a dog near the house"] * 9, 80).to_str())
    options = [option for option in TINY if not option.startswith("--vocab-size")]
    out = tmp_path / "out"
    main(["pretrain", "--data", text, "--out", str(out), *options, "--tokenizer", str(file)])
    saved = AutoTokenizer.from_pretrained(out / "model")
    model = EncoderForMaskedLM.from_pretrained(out / "model")
    assert len(saved) == model.config.vocab_size == json.loads((out / "results.json").read_text())["text"]["vocabulary"]


def test_mixed_precision_trains_and_keeps_float32_weights(text, finished, tmp_path):
    half, whole = run(text, tmp_path, "--dtype=bfloat16"), results_of(finished)
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path).values())
    assert half["held_out"] != whole["held_out"]
    assert half["held_out"][-1]["loss"] == pytest.approx(whole["held_out"][-1]["loss"], abs=0.05)


def test_the_seed_decides_and_judging_does_not(text, tmp_path):
    first = run(text, tmp_path / "a", "--dropout=0.1")
    often = run(text, tmp_path / "b", "--dropout=0.1", "--every=1")
    other = run(text, tmp_path / "c", "--dropout=0.1", "--seed=1")
    assert first["losses"] == often["losses"]
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert first["losses"] != other["losses"]


def test_a_loss_that_is_not_a_number_stops_with_advice_and_keeps_what_is_there(text, tmp_path, capsys, monkeypatch):
    real = LongTrainer.training_step

    def training_step(self, *arguments):
        return real(self, *arguments) * (float("nan") if self.state.global_step >= 4 else 1.0)

    monkeypatch.setattr(LongTrainer, "training_step", training_step)
    message = fails(capsys, "pretrain", "--data", text, "--out", str(tmp_path), *TINY)
    assert "--learning-rate: loss is not finite (NaN or inf) after 5 steps; 0.01 is too high, try 0.0025" in message
    assert json.loads((tmp_path / "results.json").read_text())["step"] == 4


def test_tensorboard_gets_the_losses(finished):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4, 6]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_gets_the_losses_of_each_training_under_the_folders_name(text, finished, tmp_path, monkeypatch, name):
    tracker = toy_tracker(monkeypatch, name)
    results = run(text, tmp_path / "mine", f"--report-to={name}")
    run(text, tmp_path / "other", f"--report-to={name}")
    assert tracker.names == ["mine", "other"]
    logged = [
        (logs["train/global_step"], round(logs["train/loss"], 4))
        for logs in tracker.logs["mine"]
        if "train/loss" in logs
    ]
    assert logged == [(point["step"], point["loss"]) for point in results["losses"]]
    assert sum("eval/loss" in logs for logs in tracker.logs["mine"]) == len(results["held_out"])
    assert not (tmp_path / "mine" / "tensorboard").exists()
    assert same(weights(tmp_path / "mine"), weights(finished))


def test_nothing_is_reported_to_none(text, tmp_path):
    run(text, tmp_path, "--report-to=none")
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("command", ["pretrain", "translate train", "finetune"])
def test_a_tracker_that_is_not_installed_is_one_line(command, capsys, tmp_path, monkeypatch):
    for module in (options, trackers):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    given = {"translate train": ["--data", "x.tsv"], "finetune": ["--model", "x", "--task", "rte"]}.get(command, [])
    message = fails(capsys, *command.split(), *given, "--out", str(tmp_path / "out"), "--report-to=wandb")
    assert "--report-to: wandb is not installed; try `pip install wandb`" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("blocks", "padding"), [("4", 0), ("2x3-2-2", 3), ("1-1", 1)])
def test_the_padding_that_truncation_drops(blocks, padding):
    config = EncoderConfig(blocks=blocks)
    assert end_padding(config) == padding
    config = EncoderConfig(blocks=blocks, truncate_seq=False)
    assert end_padding(config) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --position tsia => --position: unknown position method 'tsia'; did you mean 'tisa'?
        --position tisa+tisa => --position: 'tisa+tisa' names a method twice
        --position rope --num-heads 128 => --position: rotary_dim: expected an even number
        --blocks four => --blocks: expected layers as '12', '1x12' or '4-4-4', got 'four'
        --blocks '' => --blocks: expected layers as
        --blocks 4-4 --decoder-layers 0 => --decoder-layers: expected at least 1, got 0
        --decoder-layers 2 => --decoder-layers: a single block is never pooled
        --blocks 2-2 --decoder-layers x => --decoder-layers: expected layers as
        --windows 3,x => --windows: expected numbers as '128' or '128,128,0' (0: no window), got '3,x'
        --windows=-3 => --windows: expected numbers as
        --windows 1,2,3,4,5 => --windows: expected at most 4 numbers, one per layer, got '1,2,3,4,5'
        --preset modernbert --norm post => --first-norm: False needs norm 'pre', got 'post'
        --num-heads 5 => --num-heads: 5 heads do not divide hidden_size 128
        --num-heads 0 => --num-heads: expected at least 1, got 0
        --hidden-size 0 => --hidden-size: expected at least 1, got 0
        --embedding-size 0 => --embedding-size: expected at least 1, got 0
        --dropout 1 => --dropout: expected 0 to 0.9, got 1.0
        --dropout nan => --dropout: expected 0 to 0.9, got nan
        --length 4 => --length: expected at least 8, got 4
        --steps 0 => --steps: expected at least 1, got 0
        --batch-size 0 => --batch-size: expected at least 1, got 0
        --accumulate 0 => --accumulate: expected at least 1, got 0
        --every 0 => --every: expected at least 1, got 0
        --warmup 3000 => --warmup: expected 0 to 2000, got 3000
        --seed -1 => --seed: expected 0 to 4294967295, got -1
        --mask-rate 1 => --mask-rate: expected a share between 0 and 1, got 1.0
        --learning-rate nan => --learning-rate: expected a positive number, got nan
        --vocab-size 10 => --vocab-size: expected at least 64, got 10
        --vocab-size 100 --tokenizer x => --vocab-size: only without --tokenizer
        --tokenizer no/such => --tokenizer: expected a tokenizer.json or a folder with one, got 'no/such'
        --generator-size 0.5 => --generator-size: only for --objective electra, got mlm
        --objective electra --hide-masked => --hide-masked: only for --objective mlm
        --objective electra --generator-size 2 => --generator-size: expected 0.01 to 1, got 2.0
        --objective electra --generator-size 0.01 --position transformer_xl => no generator 0.01 times as wide
        --position transformer_xl --hidden-size 15 --num-heads 5 => --hidden-size: transformer_xl needs an even one
        --position-options { => --position-options: expected a JSON object such as '{"num_kernels": 3}', got '{'
        --position-options [3] => --position-options: expected a JSON object such as '{"num_kernels": 3}', got '[3]'
        --position-options '{"clip": 3}' => --position-options: position 'tisa' has no option 'clip'; it has num_kernels
        --position-options '{"num_kernels": "3"}' => num_kernels: expected a whole number, got '3'
        --position-options '{"share_layers": 1}' => share_layers: expected True or False, got 1
        --position-options '{"rotary_dim": 7}' --position rope => --position-options: rotary_dim: expected an even
        --position-options {} --position tsia => --position: unknown position method 'tsia'
        --data no/such/file => --data: no such file or folder: 'no/such/file'
        --lengths 128 => --lengths: expected lengths and shares such as '128:0.9,512:0.1', got '128'
        --lengths 128:0.9,512:x => --lengths: expected lengths and shares such as
        --lengths 128:0.9,512:0.2 => --lengths: expected shares that add up to 1, got 1.1
        --lengths 128:nan,512:0.1 => and shares above 0 and up to 1, got '128:nan'
        --lengths 128:1.5,512:-0.5 => and shares above 0 and up to 1, got '128:1.5'
        --lengths 4:0.9,512:0.1 => --lengths: expected lengths of 8 to 1048576
        --lengths 128:0.9,512:0.1 --steps 4 => --lengths: expected at least one step of each length
        --lengths 128:0.9,512:0.1 --length 128 => --lengths: only without --length
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2_before_the_text_is_read(
    arguments, expected, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Text, "fingerprint", None)
    message = fails(capsys, "pretrain", "--out", str(tmp_path / "out"), *arguments)
    assert expected in message


def test_too_little_text_for_a_window(text, tmp_path, capsys):
    message = fails(capsys, "pretrain", "--data", text, "--out", str(tmp_path), *TINY, "--length=9000")
    assert "--data: too little text" in message
    assert "expected at least 8998 for one window" in message


def test_a_window_too_short_for_its_padding(text, tmp_path, capsys):
    options = ["--blocks=1-1-1-1-1", "--length=16"]
    message = fails(capsys, "pretrain", "--data", text, "--out", str(tmp_path), *TINY, *options)
    assert "--length: expected at least 21 for blocks '1-1-1-1-1', got 16" in message


def test_a_thread_can_train(text, tmp_path):
    """Where there are no signals."""
    import threading

    errors = []

    def work():
        try:
            run(text, tmp_path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert (tmp_path / "model" / "config.json").exists()


def cached_files(out):
    return {
        path: path.stat().st_mtime_ns for path in (out / "cache").rglob("*") if path.is_file() and path.name != ".lock"
    }


def test_starting_again_reads_the_cache_and_ends_with_the_same_bits(text, finished, copy):
    for part in ("checkpoints", "model"):
        shutil.rmtree(copy / part)
    (copy / "results.json").unlink()
    before = cached_files(copy)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(caches, "fit_tokenizer", None)
        again = run(text, copy)
    assert before.items() <= cached_files(copy).items()
    assert same(weights(copy), weights(finished))
    assert without_time(again) == without_time(results_of(finished))


def test_runs_share_a_cache_and_a_cache_may_be_deleted(text, finished, tmp_path):
    shared = f"--cache={tmp_path / 'cache'}"
    first = run(text, tmp_path / "a", shared)
    assert not (tmp_path / "a" / "cache").exists()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(caches, "fit_tokenizer", None)
        other = run(text, tmp_path / "b", shared, "--seed=1")
    assert first["losses"] != other["losses"]
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "a" / "model")
    assert without_time(run(text, tmp_path / "a")) == without_time(results_of(finished))
    assert same(weights(tmp_path / "a"), weights(finished))


def test_data_may_be_several_paths_and_patterns(text, tmp_path, capsys):
    story = Path(text).read_text()
    half = len(story) // 2
    for name, part in (("1.txt", story[:half]), ("2.txt", story[half:])):
        (tmp_path / name).write_text(part)
    common = [*TINY, "--dry-run", "--out", str(tmp_path / "out")]
    main(["pretrain", "--data", f"{tmp_path}/?.txt", *common])
    pattern = capsys.readouterr().out
    main(["pretrain", "--data", str(tmp_path / "1.txt"), str(tmp_path / "2.txt"), *common])
    assert "training and" in pattern.split(" from ")[0]
    assert pattern.split(" from ")[0] == capsys.readouterr().out.split(" from ")[0]
    message = fails(capsys, "pretrain", "--data", f"{tmp_path}/*.nothing", *common)
    assert message == f"whereformer: --data: no file matches '{tmp_path}/*.nothing'"


LENGTHS = "--lengths=8:0.5,16:0.5"
STAGED = [option for option in TINY if not option.startswith("--length")]


def staged(text, out, *more):
    main(["pretrain", "--data", text, "--out", str(out), *STAGED, LENGTHS, *more])
    return results_of(out)


def test_a_length_schedule_trains_on_short_windows_and_then_on_long_ones(text, tmp_path, capsys, monkeypatch):
    seen = []
    real = LongTrainer.training_step

    def training_step(self, model, inputs, *others):
        seen.append(tuple(inputs["input_ids"].shape))
        return real(self, model, inputs, *others)

    monkeypatch.setattr(LongTrainer, "training_step", training_step)
    results = staged(text, tmp_path, "--position=learned")
    assert seen == [(4, 8)] * 3 + [(2, 16)] * 3
    assert results["tokens_seen"] == 6 * 32
    assert (results["settings"]["lengths"], results["settings"]["length"]) == ("8:0.5,16:0.5", 16)
    # Position tables are as long as the longest window.
    assert results["positional_parameters"] == 16 * 16
    windows = held_out_windows(text, tmp_path, 0)
    batch = collate([windows[row] for row in range(len(windows))])
    with torch.no_grad():
        score = float(EncoderForMaskedLM.from_pretrained(tmp_path / "model").eval()(**batch).loss)
    assert results["held_out"][-1]["loss"] == pytest.approx(score, abs=1e-3)
    assert "steps 1 to 3: 4 windows of 8 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [["--dropout=0.2", "--accumulate=2"], pytest.param([*ELECTRA, *FUNNEL], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_schedule_continues_to_the_bit_on_both_sides_of_the_switch(text, tmp_path, options, step):
    whole = staged(text, tmp_path / "whole", *options, "--keep=9")
    resumed = shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(resumed / "model")
    for path in (resumed / "checkpoints").iterdir():
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    again = staged(text, resumed, *options, "--keep=9")
    assert same(weights(tmp_path / "whole"), weights(resumed))
    assert without_time(whole) == without_time(again)


def test_a_schedule_of_one_length_is_that_length(text, finished, tmp_path):
    main(["pretrain", "--data", text, "--out", str(tmp_path), *STAGED, "--lengths=16:1"])
    assert same(weights(tmp_path), weights(finished))


def test_a_dry_run_shows_the_schedule_and_what_its_batches_cost(text, tmp_path, capsys):
    main(["pretrain", "--data", text, "--out", str(tmp_path / "out"), *STAGED, LENGTHS, "--dry-run"])
    out = capsys.readouterr().out
    assert out.index("steps 1 to 3: 4 windows of 8 tokens") < out.index("steps 4 to 6: 2 windows of 16 tokens")
    assert "a batch of 8-token windows" in out
    assert "a batch of 16-token windows" in out
    assert not (tmp_path / "out").exists()


def test_berts_schedule():
    stages = PretrainTraining(lengths="128:0.9,512:0.1", steps=1000, batch_size=16).resolved_training("mlm").stages()
    assert stages == [Stage(128, 900, 16, 1), Stage(512, 100, 4, 1)]
    assert [stage.rows_per_step * stage.length for stage in stages] == [2048, 2048]
    batches = list(StagedBatches([Stage(8, 2, 3, 1), Stage(16, 1, 2, 2)]))
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
