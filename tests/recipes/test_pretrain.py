"""Pretraining end to end, at a size that takes seconds."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, pipeline

import whereformer
from tests.failing import fails, refusals
from tests.lab.test_train import Waits
from tests.recipes.trainings import TINY_ENCODER, crash, results_of, same, stop_at, weights
from whereformer import Electra, Encoder, EncoderConfig, EncoderForMaskedLM, EncoderForPreTraining
from whereformer.cli.main import main
from whereformer.data import encode as caches
from whereformer.data import windows
from whereformer.data.corpus import TextSource
from whereformer.data.encode import TokenizerChoice, open_or_encode
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.data.windows import Stage, Windows, count_end_padding
from whereformer.errors import InputError
from whereformer.lab import training_recipe
from whereformer.lab.run import read_records
from whereformer.models import checks, encoder
from whereformer.positions import visible_keys

TINY = [*TINY_ENCODER, "--every=2", "--learning-rate=0.01"]


@pytest.fixture(scope="module", autouse=True)
def _judged_on_little_text():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(windows, "MAX_HELD_OUT_WINDOWS", 16)
        yield


def run(text, out, *flags):
    main(["pretrain", "--data", text, "--out", str(out), *TINY, *flags])
    return results_of(out)


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


def test_it_writes_model_tokenizer_and_report_and_says_how_to_use_them(text, tmp_path, capsys):
    results = run(text, tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert [step for step, _ in results["losses"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in results["scores"]] == [2, 4, 6]
    assert all(score["loss"] > 0 and 0 <= score["accuracy"] <= 1 for _, score in results["scores"])
    assert results["tokens"] == 6 * 4 * 16
    assert results["parameters"] > results["embedding_parameters"] > results["positional_parameters"] == 30
    assert "step 6: held-out loss" in out
    assert f"AutoModel.from_pretrained('{tmp_path}/model') is the encoder" in (tmp_path / "report.md").read_text()
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.rglob("*partial"))


def test_the_function_does_what_the_command_does(text, finished, tmp_path):
    sizes = {"length": 16, "hidden_size": 16, "num_heads": 2, "blocks": "1", "vocab_size": 64, "batch_size": 4}
    options = {"data": text, **sizes, "steps": 6, "every": 2, "learning_rate": 0.01, "quiet": True}
    report = whereformer.pretrain(**options, out=tmp_path / "out")
    assert same(weights(tmp_path / "out"), weights(finished))
    assert {**report.values, **report.values["about"]} == results_of(tmp_path / "out") == results_of(finished)
    assert "6 steps, 384 tokens; held-out loss" in str(report)
    assert "<table" in report._repr_html_()
    with pytest.raises(InputError, match=r"^out: expected a folder for the model, got None"):
        whereformer.pretrain()


def judged_windows(text, out, padding=0, *, uniforms=False):
    """As pretraining at TINY's sizes scores them."""
    prepared = open_or_encode(out / "cache", TextSource([text]), TokenizerChoice(None, 64))
    ids = prepared.vocabulary
    end = (ids.sep, *[ids.pad] * padding)
    windows = Windows(prepared.training, ids, [Stage(16, 6, 4)], end=end, uniforms=uniforms)
    return list(windows.held_out_windows(prepared.held_out))


def test_what_is_saved_is_what_was_trained(text, finished):
    model = AutoModelForMaskedLM.from_pretrained(finished / "model")
    assert isinstance(model, EncoderForMaskedLM)
    assert isinstance(Encoder.from_pretrained(finished / "model"), Encoder)
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert model(**tokenizer("the cat", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
    # The score by hand, from the saved model and the text.
    losses, batches = [], judged_windows(text, finished)
    assert sum(len(batch["labels"]) for batch in batches) == 16
    for batch in batches:
        with torch.no_grad():
            losses.append(float(model.eval()(**batch).loss))
    assert results_of(finished)["scores"][-1][1]["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-3)


def test_fill_mask(finished):
    folder = finished / "model"
    fill = pipeline("fill-mask", model=str(folder), top_k=3)
    mask = fill.tokenizer.mask_token
    tokens = [candidate["token_str"] for candidate in fill(f"the {mask} saw the dog")]
    ids = fill.tokenizer(f"the {mask} saw the dog", return_tensors="pt")
    with torch.no_grad():
        logits = EncoderForMaskedLM.from_pretrained(folder)(**ids).logits
    best = logits[0, (ids["input_ids"][0] == fill.tokenizer.mask_token_id).nonzero()[0, 0]].topk(3).indices
    assert [fill.tokenizer.convert_tokens_to_ids(token) for token in tokens] == best.tolist()


def test_the_saved_tokenizer_truncates_to_the_models_length(finished):
    folder = finished / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == EncoderConfig.from_pretrained(folder).max_position_embeddings == 16
    assert len(tokenizer("the cat " * 30, truncation=True)["input_ids"]) == 16


def test_the_loss_falls_below_guessing_by_frequency(text, tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "MAX_HELD_OUT_WINDOWS", 1000)
    results = run(text, tmp_path, "--steps=150", "--every=150", "--batch-size=16")
    guess = open_or_encode(tmp_path / "cache", TextSource([text]), TokenizerChoice(None, 64)).guessing
    assert results["scores"][-1][1]["loss"] < guess - 0.3
    assert results["losses"][-1][1] < results["losses"][0][1] - 0.5


ELECTRA = ["--objective=electra", "--num-heads=4", "--dropout=0.1"]
FUNNEL = ["--blocks=1-1x2", "--decoder-layers=1"]


@pytest.mark.parametrize(
    "options",
    [
        ["--dropout=0.2", "--accumulate=2", "--hide-masked"],
        [*ELECTRA, *FUNNEL],
        pytest.param(["--schedule=cosine"], marks=pytest.mark.slow),
        ["--dropout=0.2", "--accumulate=2", "--grow"],
        pytest.param([*ELECTRA, *FUNNEL, "--grow"], marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_continues_to_the_same_bits(options, text, tmp_path, capsys):
    unbroken = run(text, tmp_path / "whole", *options)
    killed = tmp_path / "killed"
    stop_at(Windows.batch, 4, crash, lambda: run(text, killed, *options))  # behind a checkpoint
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert not (killed / "model").exists()
    assert run(text, killed, *options) == unbroken
    assert "continuing after step 2 of 6" in capsys.readouterr().out
    assert same(weights(killed), weights(tmp_path / "whole"))


def test_ctrl_c_in_the_last_step_loses_no_step(text, finished, tmp_path, capsys):
    stop_at(Windows.batch, 6, lambda: os.kill(os.getpid(), signal.SIGINT), lambda: run(text, tmp_path))
    assert not (tmp_path / "model").exists()
    assert run(text, tmp_path) == results_of(finished)
    assert "continuing after step 6 of 6" in capsys.readouterr().out
    assert same(weights(tmp_path), weights(finished))


def test_electra_keeps_its_discriminator(text, tmp_path, capsys):
    results = run(text, tmp_path, *ELECTRA)
    scores = results["scores"][-1][1]
    assert scores["loss"] == pytest.approx(scores["generator_loss"] + 50 * scores["discriminator_loss"])
    model, loading = EncoderForPreTraining.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.config.hidden_size == 16
    joint = load_file(tmp_path / "checkpoints" / "checkpoint-4" / "model.safetensors")
    assert any(name.startswith("generator.") for name in joint)
    assert results["parameters"] > sum(parameter.numel() for parameter in model.parameters())
    assert "generator loss" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "padding"), [pytest.param("1", 0, marks=pytest.mark.slow), ("1-1-1", 3)])
def test_electras_scores_are_over_all_held_out_tokens_and_not_means_of_batches(text, tmp_path, blocks, padding):
    # A discriminator that has learnt little is right about some of the replaced tokens.
    options = [*ELECTRA, f"--blocks={blocks}", "--learning-rate=1e-5", "--every=1"]
    _, scores = run(text, tmp_path, *options)["scores"][-2]
    model = Electra.from_pretrained(tmp_path / "checkpoints" / "checkpoint-5").eval()
    model.config.label_share = None
    chances, verdicts, recalls = [], [], []
    for batch in judged_windows(text, tmp_path, padding, uniforms=True):
        with torch.no_grad():
            out = model(**batch)
        is_target = batch["labels"] != -100
        logits = out.generator_logits[: int(is_target.sum())]
        chances.append(logits.log_softmax(-1).gather(1, batch["labels"][is_target][:, None]))
        replaced = is_target & (out.sampled_ids != batch["labels"])
        right = torch.where(replaced, -out.discriminator_logits, out.discriminator_logits)
        verdicts.append(right[:, : 16 - padding].flatten())
        recalls.append(right[replaced])
    chances, verdicts, recalls = (torch.cat(parts) for parts in (chances, verdicts, recalls))
    assert scores["generator_loss"] == pytest.approx(float(-chances.mean()), abs=1e-4)
    assert scores["discriminator_loss"] == pytest.approx(float(-verdicts.sigmoid().log().mean()), abs=1e-4)
    assert scores["accuracy"] == pytest.approx(float((verdicts > 0).float().mean()), abs=1e-4)
    assert scores["replaced_recall"] == pytest.approx(float((recalls >= 0).float().mean()), abs=1e-4)
    assert 0 < scores["replaced_recall"] < 1


def test_a_funnel_ends_its_windows_with_what_truncation_drops(text, tmp_path, capsys):
    results = run(text, tmp_path, "--blocks=1-1-1")
    assert results["tokens"] == 6 * 4 * 13
    assert "blocks 1-1-1 of 16, 8, 4 tokens" in capsys.readouterr().out
    model = EncoderForMaskedLM.from_pretrained(tmp_path / "model")
    assert model.config.decoder_layers == "2"
    assert model(torch.full((1, 16), 9)).logits.shape[1] == 16


@pytest.mark.parametrize("options", [[], [*ELECTRA, *FUNNEL], ["--hide-masked", "--accumulate=2"]], ids=str)
def test_no_step_waits_for_the_device(text, tmp_path, monkeypatch, options):
    for module in (encoder, checks, visible_keys):
        monkeypatch.setattr(module, "can_read", lambda tensor: False)  # as for tensors of a GPU
    mode, real = Waits(sizes=True), Windows.batch

    def batch(self, number):
        with torch.utils._python_dispatch._disable_current_modes():
            windows = real(self, number)
        if self.stages[0].steps == 25:  # not those of held-out text
            mode.step = number + 1
        return windows

    monkeypatch.setattr(Windows, "batch", batch)
    with mode:
        run(text, tmp_path, "--steps=25", "--every=25", *options)
    assert set(mode.found) <= {0, 20, 25}, mode.found
    assert mode.found[25]  # where held-out text is scored


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/tokenizer.json"])
def test_a_model_that_is_damaged_is_made_again(text, finished, copy, capsys, name):
    os.truncate(copy / name, 7)
    flip(copy / "checkpoints" / "checkpoint-4" / "state.pt")
    assert run(text, copy) == results_of(finished)
    out = capsys.readouterr().out
    assert f"repeating train: {name.removeprefix('model/')} was changed" in out
    assert "checkpoint-4: state.pt was changed" in out
    assert "continuing after step 2 of 6" in out
    assert same(weights(copy), weights(finished))


def test_a_finished_run_is_left_as_it_is(text, copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    (copy / "model" / "README.md").write_text("my model")
    before = {path: path.stat().st_mtime_ns for path in (copy / "model").iterdir()}
    run(text, copy)
    assert "1 of 1 runs are already done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (copy / "model").iterdir()} == before


def test_other_settings_and_text_do_not_mix_with_a_run_already_there(text, finished, tmp_path, capsys):
    before = (finished / "records.jsonl").read_bytes()
    common = ["pretrain", "--data", text, "--out", str(finished), *TINY]
    assert "has results with hidden_size 16, not 32" in fails(capsys, *common, "--hidden-size=32")
    assert "has results with schedule 'linear', not 'cosine'" in fails(capsys, *common, "--schedule=cosine")
    (tmp_path / "other.txt").write_text(Path(text).read_text() + " more")
    common[2] = str(tmp_path / "other.txt")
    line = fails(capsys, *common)
    assert line == f"whereformer: --data: {finished} has results for a different text; choose another folder"
    assert (finished / "records.jsonl").read_bytes() == before


def test_another_tokenizer(text, tmp_path, capsys):
    folder = tmp_path / "tokenizer"
    fit_tokenizer(["the cat saw a dog near the house"] * 9, 80).save_pretrained(folder)
    options = [option for option in TINY if not option.startswith("--vocab-size")]
    command = ["pretrain", "--data", text, "--out", str(tmp_path / "out"), *options, "--tokenizer", str(folder)]
    main(command)
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert len(saved) == EncoderForMaskedLM.from_pretrained(tmp_path / "out" / "model").config.vocab_size
    capsys.readouterr()
    fit_tokenizer(["a zebra ran"] * 9, 80).save_pretrained(folder)
    assert "--tokenizer: " in (line := fails(capsys, *command))
    assert "has results for a different tokenizer" in line


def test_a_dry_run_says_what_would_happen_and_writes_nothing(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ['--position-options={"num_kernels": 100}', "--dry-run"]
    main(["pretrain", "--data", text, "--out", str(tmp_path / "out"), *TINY, *flags])
    out = " ".join(capsys.readouterr().out.split())
    assert "A dry run: nothing was trained or written." in out
    assert "wrote" not in out
    assert "6 steps of 64 tokens" in out
    assert list(tmp_path.iterdir()) == []


def test_a_methods_options_and_narrow_embeddings_are_trained_saved_and_counted(text, tmp_path, capsys):
    options = ["--position=tisa+fire", '--position-options={"width": 6, "initial_threshold": 8, "num_kernels": 2}']
    options += ["--embedding-size=4", "--windows=2,0", "--blocks=2"]
    results = run(text, tmp_path, *options)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.position_options == {"num_kernels": 2, "width": 6, "initial_threshold": 8}
    assert (config.embedding_size, config.windows) == (4, "2,0")
    assert (config.sparse_prediction, config.label_share) == (False, None)
    assert results["embedding_parameters"] == 64 * 4
    saved = weights(tmp_path)
    assert saved["encoder.embeddings.projection.weight"].shape == (16, 4)
    assert results["parameters"] == sum(weight.numel() for weight in saved.values())
    # The same said otherwise goes on; other options don't.
    options[1] = '--position-options={"num_kernels": 2, "initial_threshold": 8,"width":6}'
    assert run(text, tmp_path, *options) == results
    options[1] = '--position-options={"num_kernels": 3}'
    message = fails(capsys, "pretrain", "--data", text, "--out", str(tmp_path), *TINY, *options)
    assert "has results with position_options" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--preset=modernbert", "--blocks=2"],
            {"windows": "0,64,64", "feed_forward": "gated", "norm": "pre", "first_norm": False, "position": "rope"},
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
    run(text, tmp_path, *words)
    assert read_records(tmp_path / "records.jsonl")[0]["preset"] == words[0].partition("=")[2]
    config = Encoder.from_pretrained(tmp_path / "model").config
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.hidden_dropout_prob == 0.0


def test_mixed_precision_trains_and_keeps_float32_weights(text, finished, tmp_path):
    (_, half), (_, full) = run(text, tmp_path, "--dtype=bfloat16")["scores"][-1], results_of(finished)["scores"][-1]
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path).values())
    assert half != full
    assert half["loss"] == pytest.approx(full["loss"], abs=0.05)


def test_the_seed_decides_and_judging_does_not(text, tmp_path):
    first = run(text, tmp_path / "a", "--dropout=0.1")
    often = run(text, tmp_path / "b", "--dropout=0.1", "--every=1", "--keep=3")
    reseeded = run(text, tmp_path / "c", "--dropout=0.1", "--seed=1")
    assert first["losses"] == often["losses"]
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert first["losses"] != reseeded["losses"]
    names = sorted(path.name for path in (tmp_path / "b" / "checkpoints").iterdir())
    assert names == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]


def test_tensorboard_gets_the_losses(finished):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4, 6]


def test_without_tensorboard_nothing_is_written_for_it(text, finished, tmp_path, monkeypatch, capsys):
    run(text, tmp_path / "mine", "--report-to=none")
    assert not (tmp_path / "mine" / "tensorboard").exists()
    assert same(weights(tmp_path / "mine"), weights(finished))
    monkeypatch.setattr(training_recipe, "find_spec", lambda name: None)
    message = fails(capsys, "pretrain", "--out", str(tmp_path / "out"), "--report-to=tensorboard")
    assert "--report-to: tensorboard is not installed; try `pip install tensorboard`" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model", "checkpoints", "cache", "tensorboard"])
def test_where_results_go_is_tried_before_the_text_is_read(name, text, tmp_path, capsys):
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    line = fails(capsys, "pretrain", "--data", text, "--out", str(tmp_path), "--report-to=tensorboard")
    assert line == f"whereformer: --out: '{tmp_path / name}' is a link that leads nowhere; remove or mend it"


@pytest.mark.parametrize(("blocks", "padding"), [("4", 0), ("2x3-2-2", 3), ("1-1", 1)])
def test_the_padding_that_truncation_drops(blocks, padding):
    config = EncoderConfig(blocks=blocks)
    assert count_end_padding(config) == padding
    config = EncoderConfig(blocks=blocks, truncate_seq=False)
    assert count_end_padding(config) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --position tsia => --position: unknown position method 'tsia'; did you mean 'tisa'?
        --position hybrid => --position: unknown position method 'hybrid'; known: none
        --position tisa+tisa => --position: 'tisa+tisa' names a method twice
        --position rope --num-heads 128 => --position: rotary_dim: expected an even number
        --blocks 4-4 --decoder-layers 0 => --decoder-layers: expected at least 1, got 0
        --blocks 2-2 --decoder-layers x => --decoder-layers: expected layers as
        --windows 3,x => --windows: expected numbers as '128' or '128,128,0' (0: no window), got '3,x'
        --preset modernbert --norm post => --first-norm: False needs norm 'pre', got 'post'
        --num-heads 5 => --num-heads: 5 heads do not divide hidden_size 128
        --dropout 1 => --dropout: expected 0 to 0.9, got 1.0
        --compile --accumulate 2 => --compile: only in one process and without --accumulate; leave it out
        --warmup 3000 => --warmup: expected 0 to 2000, got 3000
        --tokenizer no/such => --tokenizer: expected the folder of a saved tokenizer, got 'no/such'
        --objective electra --hide-masked => --hide-masked: only for --objective mlm
        --position transformer_xl --hidden-size 15 --num-heads 5 => --hidden-size: transformer_xl needs an even number
        --position-options { => --position-options: expected a JSON object such as '{"num_kernels": 3}', got '{'
        --position-options [3] => --position-options: expected a JSON object such as '{"num_kernels": 3}', got '[3]'
        --position-options '{"clip": 3}' => --position-options: position 'tisa' has no option 'clip'; it has num_kernels
        --position-options '{"num_kernels": "3"}' => num_kernels: expected an integer, got '3'
        --position-options '{"share_layers": 1}' => share_layers: expected True or False, got 1
        --position-options '{"rotary_dim": 7}' --position rope => --position-options: rotary_dim: expected an even
        --position-options {} --position tsia => --position: unknown position method 'tsia'
        --data no/such/file => --data: no such file or folder: 'no/such/file'
        --length 4 => --length: expected at least 8, got 4
        --grow --blocks 1-1-1 => --grow: expected windows of at least 9 tokens for blocks '1-1-1', got 8
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2_before_the_text_is_read(
    arguments, expected, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(TextSource, "fingerprint", None)
    assert expected in fails(capsys, "pretrain", "--out", str(tmp_path / "out"), *arguments)


def test_too_little_text_for_a_window_and_a_window_too_short_for_its_padding(text, tmp_path, capsys):
    common = ["pretrain", "--data", text, "--out", str(tmp_path), *TINY]
    message = fails(capsys, *common, "--length=9000")
    assert "--data: too little text" in message
    assert "expected at least 8998 for one window" in message
    message = fails(capsys, *common, "--blocks=1-1-1-1-1", "--length=16")
    assert "--length: expected windows of at least 21 tokens for blocks '1-1-1-1-1', got 16" in message


def test_runs_share_a_cache_and_a_cache_may_be_deleted(text, finished, tmp_path):
    shared = f"--cache={tmp_path / 'cache'}"
    first = run(text, tmp_path / "a", shared)
    assert not (tmp_path / "a" / "cache").exists()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(caches, "fit_tokenizer", None)
        reseeded = run(text, tmp_path / "b", shared, "--seed=1")
    assert first["losses"] != reseeded["losses"]
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "a" / "model")
    assert run(text, tmp_path / "a") == results_of(finished)
    assert same(weights(tmp_path / "a"), weights(finished))


def test_windows_grow(text, tmp_path, monkeypatch):
    shapes, real = [], Windows.batch

    def batch(self, step):
        windows = real(self, step)
        if len(self.stages) > 1:  # held-out text has one
            shapes.append(tuple(windows["input_ids"].shape))
        return windows

    monkeypatch.setattr(Windows, "batch", batch)
    results = run(text, tmp_path, "--position=learned", "--grow")
    assert shapes == [(8, 8)] * 2 + [(4, 16)] * 4
    assert results["tokens"] == 6 * 64
    # Position tables are as long as the longest window.
    assert results["positional_parameters"] == 16 * 16
