"""The comparison end to end, at a size that takes seconds."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

import whereformer
from tests.failing import fails, refusals
from tests.studies.trainings import TINY_ENCODER, same, without_time
from whereformer import positions
from whereformer.cli.main import main
from whereformer.lab import fit
from whereformer.models import EncoderConfig, EncoderForCausalLM, EncoderForMaskedLM, load_pretrained
from whereformer.models.presets import PRESETS
from whereformer.studies.compare import run as compare
from whereformer.studies.compare import settings
from whereformer.studies.compare.models import encoder_config, untrained
from whereformer.studies.compare.results import CompareResults
from whereformer.studies.compare.settings import Compare

TINY = ["--rate-factors=1", *TINY_ENCODER]


def run(text, out, *more, positions="none,learned,tisa"):
    main(["compare", "--data", text, "--out", str(out), "--positions", positions, *TINY, *more])
    return json.loads((out / "results.json").read_text())


def test_it_writes_results_and_report_and_prints_a_ranking(text, tmp_path, capsys):
    results = run(text, tmp_path)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100 or "wrote" in max(out.splitlines(), key=len)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert set(results["runs"]) == {"none", "learned", "tisa"}
    tisa, learned = results["runs"]["tisa"]["0"], results["runs"]["learned"]["0"]
    assert set(tisa["scores"]) == {"16", "32", "64"}
    assert all("loss" in score for score in tisa["scores"].values())
    assert "covers positions 0 to 15" in learned["scores"]["32"]["cannot"]
    assert "cannot" in out
    assert len(tisa["train_loss"]) == 6
    assert tisa["positional_parameters"] == 3 * 5 * 2
    assert torch.tensor(tisa["curves"]).shape == (1, 2, 31)
    assert learned["curves"] is None
    assert torch.tensor(learned["attention"]).shape == (1, 2, 31)
    assert set(results["speed"]) == {"none", "learned", "tisa"}
    assert results["speed"]["none"]["relative_speed"] == 1.0
    assert all(speed["peak_memory"] > 0 for speed in results["speed"].values())


def test_causal_models_are_compared_by_the_next_token(text, tmp_path, capsys):
    results = run(text, tmp_path, "--causal", positions="none,fox")
    shown = capsys.readouterr().out
    assert "Held-out causal-LM loss" in shown
    assert "not learning" not in shown
    assert results["predicted_tokens"] == results["text"]["held_out_tokens"] // 64 * 64
    page = (tmp_path / "report.html").read_text()
    assert "predict the next token" in page
    assert "masked" not in page
    model = EncoderForCausalLM.from_pretrained(tmp_path / "models" / "fox-0").eval()
    ids = torch.arange(5, 21)[None]
    changed = ids.clone()
    changed[0, 8:] = 7
    torch.testing.assert_close(model(ids).logits[0, :8], model(changed).logits[0, :8])
    weights = torch.tensor(results["runs"]["fox"]["0"]["attention"])
    assert (weights[..., 16:] == 0).all()
    capsys.readouterr()
    for bad, reason in {
        "--causal --blocks 1-1": "--causal: pooling mixes a token with the next",
    }.items():
        assert reason in fails(capsys, "compare", *bad.split(), "--out", str(tmp_path / "bad"))
    refused = fails(capsys, "positions", "--measure", str(tmp_path))
    assert "expected masked language models, got causal ones" in refused


def test_methods_start_from_the_same_backbone_and_differ_only_in_position():
    sizes = Compare(blocks="1x2", length=16, steps=4, hidden_size=16, vocab_size=64).job().settings
    models = {name: untrained(sizes, name, 64, seed=5) for name in ("none", "tisa", "tupe+t5", "floater")}
    backbone = models["none"].state_dict()
    for model in models.values():
        state = model.state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in backbone.items())
    other = untrained(sizes, "none", 64, seed=6).state_dict()
    assert not torch.equal(other["encoder.layers.0.up.weight"], backbone["encoder.layers.0.up.weight"])


def test_an_interrupted_run_keeps_finished_methods_and_continues(text, tmp_path, capsys, monkeypatch):
    real, trained = compare.train_and_judge, []

    def interrupted(job, position, *rest):
        if position == "tisa" and len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(position)
        return real(job, position, *rest)

    monkeypatch.setattr(compare, "train_and_judge", interrupted)
    with pytest.raises(SystemExit) as stop:
        run(text, tmp_path, positions="none,tisa")
    assert stop.value.code == 130
    assert "interrupted" in capsys.readouterr().err
    kept = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert set(kept) == {"none"}
    monkeypatch.setattr(compare, "train_and_judge", lambda *args: (trained.append(args[1]), real(*args))[1])
    results = run(text, tmp_path, positions="none,tisa")
    assert trained == ["none", "tisa"]
    assert results["runs"]["none"] == kept["none"]
    run(text, tmp_path, "--seeds", "2", positions="none,tisa")
    assert trained == ["none", "tisa", "none", "tisa"]


def delete_models(out):
    shutil.rmtree(out / "models")
    return ["none", "tisa"]


def flip_a_bit(out):
    file = out / "models" / "tisa-0" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    return ["tisa"]


def swap_models(out):
    for name, other in (("none-0", "x"), ("tisa-0", "none-0"), ("x", "tisa-0")):
        (out / "models" / name).rename(out / "models" / other)
    return ["none", "tisa"]


@pytest.mark.parametrize(
    "damage", [flip_a_bit, *(pytest.param(damage, marks=pytest.mark.slow) for damage in (delete_models, swap_models))]
)
def test_a_run_whose_model_is_gone_or_changed_is_done_again(text, tmp_path, capsys, monkeypatch, damage):
    whole = run(text, tmp_path, positions="none,tisa")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "models").rglob("*.safetensors"))}
    expected = damage(tmp_path)
    real, trained = compare.train_and_judge, []
    monkeypatch.setattr(compare, "train_and_judge", lambda *args: (trained.append(args[1]), real(*args))[1])
    capsys.readouterr()
    again = run(text, tmp_path, positions="none,tisa")
    assert trained == expected
    assert f"training {expected[0]} with seed 0 again: " in capsys.readouterr().out
    assert {path: path.read_bytes() for path in sorted((tmp_path / "models").rglob("*.safetensors"))} == before
    for name in ("none", "tisa"):
        assert without_time(again["runs"][name]["0"]) == without_time(whole["runs"][name]["0"])


def test_changed_results_are_refused(text, tmp_path, capsys):
    run(text, tmp_path, positions="none")
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"predicted_tokens": ', '"predicted_tokens": 1'))
    message = fails(capsys, "compare", "--data", text, "--out", str(tmp_path), "--positions=none", *TINY)
    assert "results.json is not a complete result of this command (it is not as it was written)" in message


def test_other_settings_do_not_mix_with_results_already_there(text, tmp_path, capsys):
    run(text, tmp_path, positions="none")
    before = (tmp_path / "results.json").read_bytes()
    message = fails(capsys, "compare", "--data", text, "--out", str(tmp_path), *TINY[:-1], "--steps=7")
    assert "--out:" in message
    assert "steps 6, not 7" in message
    assert (tmp_path / "results.json").read_bytes() == before


def test_a_loss_that_is_not_finite_stops_with_advice_and_keeps_the_rest(text, tmp_path, capsys):
    run(text, tmp_path, positions="none")
    kept = json.loads((tmp_path / "results.json").read_text())["runs"]
    monkey = pytest.MonkeyPatch()
    monkey.setattr(fit, "train_step", lambda *_: torch.tensor(float("nan")))
    with monkey.context():
        message = fails(capsys, "compare", "--data", text, "--out", str(tmp_path), "--positions", "none,tisa", *TINY)
    monkey.undo()
    assert "--learning-rate: the loss of 'tisa' is not finite (NaN or inf) after 0 steps" in message
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == kept


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --positions tsia => --positions: unknown position method 'tsia'; did you mean 'tisa'?
        --positions '' => --positions: expected at least one method, got none
        --num-heads 5 => 5 heads do not divide hidden_size 64
        --num-heads 0 => --num-heads: expected at least 1, got 0
        --length 4 => --length: expected at least 8, got 4
        --steps 0 => --steps: expected at least 1, got 0
        --seeds 0 => --seeds: expected 1 to 10000, got 0
        --mask-rate 1.5 => --mask-rate: expected a share between 0 and 1, got 1.5
        --learning-rate -1 => --learning-rate: expected a positive number, got -1.0
        --preset funnel --decoder-layers 0 => --decoder-layers: a prediction for every token needs
        --preset modernbert --blocks x => --blocks: expected layers as '12', '1x12' or '4-4-4', got 'x'
        --lengths 32 => --lengths: expected numbers from 64 to 1048576 separated by commas, got '32'
        --lengths 128,x => --lengths: expected numbers from 64 to 1048576 separated by commas, got 'x'
        --lengths '' => --lengths: expected at least one, got none
        --lengths 65,66,67,68,69,70 => --lengths: expected at most 5, got '65,66,67,68,69,70'
        --blocks 1-1 --decoder-layers 0 => --decoder-layers: a prediction for every token needs
        --blocks 2 --decoder-layers 1 => --decoder-layers: a single block is never pooled
        --data no/such/file => --data: no such file or folder: 'no/such/file'
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, tmp_path, capsys):
    message = fails(capsys, "compare", "--out", str(tmp_path / "out"), *arguments)
    assert expected in message


def test_other_lengths_are_judged(text, tmp_path):
    results = run(text, tmp_path, "--lengths=48,24", positions="none,learned")
    for name in ("none", "learned"):
        assert list(results["runs"][name]["0"]["scores"]) == ["16", "24", "48"]
    assert "cannot" in results["runs"]["learned"]["0"]["scores"]["24"]
    assert "@24" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_encoder_is_a_presets_and_positions_are_what_differs(preset):
    sizes = Compare(preset=preset, length=16, hidden_size=16, positions="none").job().settings
    expected = EncoderConfig.preset(preset)
    configs = [encoder_config(sizes, name, 64) for name in ("none", "rope")]
    for field in ("norm", "feed_forward", "biases", "hidden_act", "first_norm", "query_bias", "lm_head"):
        assert {getattr(config, field) for config in configs} == {getattr(expected, field)}, field
    assert [config.position for config in configs] == ["none", "rope"]
    assert all(config.position_options == {} for config in configs)
    assert {config.blocks for config in configs} == {PRESETS[preset].get("blocks", "4")}


def test_a_comparison_without_a_preset_normalizes_first():
    config = encoder_config(Compare().job().settings, "none", 64)
    assert (config.norm, config.blocks, config.intermediate_size) == ("pre", "4", 128)


def test_options_win_over_a_preset(text, tmp_path):
    results = run(text, tmp_path, "--preset=funnel", "--blocks=1-1", positions="none")
    assert results["settings"]["preset"] == "funnel"
    assert (results["settings"]["blocks"], results["settings"]["decoder_layers"]) == ("1-1", "2")
    config = load_pretrained(tmp_path / "models" / "none-0", model_class=EncoderForMaskedLM).config
    assert (config.query_bias, config.hidden_act) == (False, "gelu_pytorch_tanh")
    assert "with the options of funnel" in (tmp_path / "report.html").read_text()


def test_funnels_are_compared_too(text, tmp_path):
    results = run(text, tmp_path, "--blocks", "1-1", positions="none,tisa")
    for name in ("none", "tisa"):
        whole, pooled, decoder = results["runs"][name]["0"]["attention"]
        assert whole is not None
        assert pooled is None
        assert decoder is not None
    assert "layer 2" in (tmp_path / "report.html").read_text()


def test_an_output_folder_that_cannot_be_made(text, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    message = fails(capsys, "compare", "--data", text, "--out", str(tmp_path / "file" / "out"), *TINY)
    assert f"Not a directory: '{tmp_path / 'file' / 'out'}'" in message


def test_too_little_text_for_the_length(text, tmp_path, capsys):
    arguments = ["--length", "4096", "--vocab-size", "64"]
    message = fails(capsys, "compare", "--data", text, "--out", str(tmp_path), *arguments)
    assert "--data: too little text" in message
    assert "expected at least 16384 of each" in message


def test_a_method_can_be_added_to_results_already_there(text, tmp_path):
    run(text, tmp_path, positions="none")
    results = run(text, tmp_path, positions="alibi")
    assert set(results["runs"]) == {"none", "alibi"}
    assert set(results["speed"]) >= {"none", "alibi"}


@pytest.mark.slow
def test_every_method_can_be_compared(text, tmp_path):
    from whereformer import position_names
    from whereformer.positions import Position, method_class

    results = run(text, tmp_path, positions="all")
    assert list(results["runs"]) == position_names(for_text=True)
    fixed = {name for name, runs in results["runs"].items() if "cannot" in runs["0"]["scores"]["32"]}
    assert fixed == {*position_names(extrapolates=False, for_text=True)}
    with_curves = {name for name, runs in results["runs"].items() if runs["0"]["curves"]}
    assert with_curves == {
        name for name in position_names(for_text=True) if method_class(name).curve is not Position.curve
    }


def test_other_text_does_not_mix_with_results_already_there(text, tmp_path, capsys):
    run(text, tmp_path / "out", positions="none")
    other = tmp_path / "other.txt"
    other.write_text("something else entirely. " * 2000)
    message = fails(capsys, "compare", "--data", str(other), "--out", str(tmp_path / "out"), *TINY)
    assert "holds results for a different text" in message


def test_paths_with_brackets_are_printed_as_they_are(text, tmp_path, capsys):
    run(text, tmp_path / "[b]out[/b]", positions="none")
    assert "[b]out[/b]/report.html" in capsys.readouterr().out


@pytest.mark.slow
def test_several_runs_at_a_time_give_the_same_results(text, tmp_path):
    alone, spread = (
        run(text, tmp_path / name, f"--jobs={jobs}", "--steps=2", positions="none,tisa")["runs"]
        for name, jobs in (("alone", 1), ("spread", 2))
    )
    assert alone.keys() == spread.keys()
    for position, by_seed in alone.items():
        found = {**spread[position]["0"], "seconds": 0}
        assert found == {**by_seed["0"], "seconds": 0}
    for position in ("none", "tisa"):
        first, second = (
            load_file(tmp_path / name / "models" / f"{position}-0" / "model.safetensors")
            for name in ("alone", "spread")
        )
        assert same(first, second)


def test_the_function_does_what_the_command_does(text, tmp_path):
    by_command = run(text, tmp_path / "command", "--steps=2", positions="none,tisa")
    tiny = {"length": 16, "batch_size": 4, "blocks": "1", "hidden_size": 16, "vocab_size": 64, "rate_factors": "1"}
    results = whereformer.compare(
        data=text, positions=["none", "tisa"], steps=2, out=tmp_path / "function", quiet=True, jobs=1, **tiny
    )
    for (name, seed), done in results.each():
        assert by_command["runs"][name][str(seed)]["train_loss"] == done.train_loss
    assert "Held-out masked-LM loss" in str(results)
    assert "<table" in results._repr_html_()
    assert {path.name for path in results.save(tmp_path / "saved")} == {"report.html", "results.json"}
    assert CompareResults.load(tmp_path / "saved").runs == results.runs
    with pytest.raises(ValueError, match="step: compare has no such option; did you mean 'steps'"):
        whereformer.compare(step=3)


PLUGIN = """
from whereformer.positions import Position, register

class Own(Position):
    "Nothing, by another name."

register("{name}", Own)
"""


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_method_of_ones_own_is_compared(text, tmp_path, jobs):
    plugin = tmp_path / f"my_method{jobs}.py"
    plugin.write_text(PLUGIN.format(name=f"own{jobs}"))
    try:
        results = run(
            text, tmp_path / "out", "--steps=2", f"--plugin={plugin}", f"--jobs={jobs}", positions=f"none,own{jobs}"
        )
    finally:
        positions.METHODS.pop(f"own{jobs}", None)
    assert set(results["runs"]) == {"none", f"own{jobs}"}
    assert results["plugin"] == str(plugin)
    assert f"--plugin {plugin}" in (tmp_path / "out" / "report.html").read_text()


def test_a_changed_plugin_trains_its_methods_again(text, tmp_path, capsys):
    plugin = tmp_path / "my_method.py"
    found = []
    try:
        for content in (PLUGIN, PLUGIN, PLUGIN.replace("Nothing", "Something else")):
            plugin.write_text(content.format(name="edited"))
            os.utime(plugin, (1e9, 1e9))
            found.append(run(text, tmp_path / "out", "--steps=2", f"--plugin={plugin}", positions="none,edited"))
            if len(found) == 2:  # another process would start without it
                del positions.METHODS["edited"]
    finally:
        positions.METHODS.pop("edited", None)
    told = capsys.readouterr().out.split("2 of 2 runs are already done")
    assert "training edited again: the plugin has changed" in told[1]
    assert "1 of 2 runs are already done" in told[1]
    seconds = [{name: runs["0"]["seconds"] for name, runs in each["runs"].items()} for each in found]
    assert seconds[0] == seconds[1]
    assert seconds[1]["none"] == seconds[2]["none"]
    assert seconds[1]["edited"] != seconds[2]["edited"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "--plugin: no such file: "),
        ("x = 1", "my_method.py registers no method; call whereformer.positions.register in it"),
        (PLUGIN.format(name="rope"), "--plugin: my_method.py: name: 'rope' is taken by"),
    ],
)
def test_a_bad_plugin_is_one_line(content, expected, tmp_path, capsys):
    plugin = tmp_path / "my_method.py"
    if content is not None:
        plugin.write_text(content)
    assert expected in fails(capsys, "compare", "--out", str(tmp_path / "out"), "--plugin", str(plugin))
    assert not (tmp_path / "out").exists()


def test_an_error_of_a_plugin_shows_where_it_was_raised(tmp_path):
    plugin = tmp_path / "my_method.py"
    plugin.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        main(["compare", "--out", str(tmp_path / "out"), "--plugin", str(plugin)])


def test_a_quick_comparison_reads_the_beginning_of_the_text(text, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "QUICK_CHARACTERS", 30_000)
    results = run(text, tmp_path / "quick", "--quick", "--steps=2", positions="none")
    assert results["characters"] == 30_000
    assert results["text"]["characters"] == 30_000
    assert results["text"]["source"].startswith("the first 30,000 characters of ")
    assert "--quick" in (tmp_path / "quick" / "report.html").read_text()
    monkeypatch.setattr(settings, "QUICK_CHARACTERS", 10**9)
    whole = run(text, tmp_path / "whole", "--quick", "--steps=2", positions="none")
    assert "characters" not in whole
