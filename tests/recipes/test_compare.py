"""The comparison end to end, at a size that takes seconds."""

import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.failing import fails, refusals
from tests.lab.report.pages import Page
from tests.recipes.trainings import TINY_ENCODER, same
from whereformer import positions
from whereformer.cli.main import main
from whereformer.lab import small_encoders as encoders
from whereformer.lab import train
from whereformer.lab.methods import PLUGIN as PLUGIN_MODULE
from whereformer.lab.methods import count_parameters, load_plugin
from whereformer.models import EncoderConfig, EncoderForCausalLM, EncoderForMaskedLM, load_pretrained
from whereformer.models.config import PRESETS
from whereformer.recipes import compare
from whereformer.recipes.compare import Compare, RateSearch, load

TINY = ["--rate-factors=1", "--jobs=1", *TINY_ENCODER]


def run(text, out, *flags, positions="none,learned,tisa"):
    main(["compare", "--data", text, "--out", str(out), "--positions", positions, *TINY, *flags])
    return load(out)[1]


def weights(out, position="tisa", seed=0):
    tensors = load_file(out / "models" / f"{position}-{seed}" / "model.safetensors")
    return {name: weight.clone() for name, weight in tensors.items()}  # not those of the file


def test_it_writes_records_models_and_report_and_prints_a_ranking(text, tmp_path, capsys):
    runs = run(text, tmp_path)
    out = capsys.readouterr().out
    *lines, command, _ = out.splitlines()  # the last two can be copied, so they are not wrapped
    assert command.startswith("whereformer compare ")
    assert max(map(len, lines[lines.index(next(line for line in lines if "Held-out" in line)) :])) <= 100
    assert list(runs) == ["none", "learned", "tisa"]
    tisa, learned = runs["tisa"][0], runs["learned"][0]
    assert [type(score) for score in tisa.scores] == [list] * 3
    assert "covers positions 0 to 15" in learned.scores[1]
    assert "n/a" in out
    assert len(tisa.losses) == 6
    assert tisa.parameters == 3 * 5 * 2
    assert tisa.flops >= runs["none"][0].flops > 0
    model = EncoderForMaskedLM.from_pretrained(tmp_path / "models" / "tisa-0")
    assert not model.config.sparse_prediction
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "tisa-0")
    assert (len(tokenizer), tokenizer.model_max_length) == (model.config.vocab_size, 16)
    assert not (tmp_path / "checkpoints" / "tisa-0").exists()
    page = (tmp_path / "report.html").read_text()
    Page(page).check_self_contained()
    Page(page).check_references()
    assert {row[1].removesuffix("not learning") for row in Page(page).cells[:3]} == set(runs)
    assert {"Training loss over steps", "Held-out loss over length"} <= {
        attributes.get("aria-label") for _, attributes in Page(page).tags
    }
    assert "whereformer compare --data " in page


def test_causal_models_are_compared_by_the_next_token(text, tmp_path, capsys):
    run(text, tmp_path, "--causal", positions="none,fox")
    shown = capsys.readouterr().out
    assert "Held-out causal-LM loss" in shown
    assert "not learning" not in shown
    page = (tmp_path / "report.html").read_text()
    assert "predict the next token" in page
    assert "masked" not in page.partition("<footer>")[0].partition("</style>")[2]
    model = EncoderForCausalLM.from_pretrained(tmp_path / "models" / "fox-0").eval()
    ids = torch.arange(5, 21)[None]
    changed = ids.clone()
    changed[0, 8:] = 7
    torch.testing.assert_close(model(ids).logits[0, :8], model(changed).logits[0, :8])
    capsys.readouterr()
    bad = "compare", "--causal", "--blocks", "1-1", "--out", str(tmp_path / "bad")
    assert "--causal: pooling mixes a token with the next" in fails(capsys, *bad)


def test_folders_of_one_comparison_are_merged(text, tmp_path, capsys):
    first, second, both = (tmp_path / name for name in ("first", "second", "both"))
    run(text, first, positions="none,learned")
    run(text, second, positions="none,tisa")
    (second / "models").rename(tmp_path / "disk")
    (second / "models").symlink_to(tmp_path / "disk")
    capsys.readouterr()
    main(["merge", str(first), str(second), "--out", str(both)])
    summary, command = capsys.readouterr().out.splitlines()
    assert summary.startswith(f"wrote {both} with 3 models")
    main(shlex.split(command)[1:])
    assert "3 of 3 runs are already done" in capsys.readouterr().out
    assert {name: run[0].losses for name, run in load(both)[1].items()} == {
        name: run[0].losses for folder in (second, first) for name, run in load(folder)[1].items()
    }
    assert same(weights(both), weights(second))
    for arguments, message in refusals(f"""
        {first} --out {tmp_path}/one => FOLDERS: expected at least two, got 1
        {first} {second} --out {both} => --out: expected a folder that does not exist yet
        {first} {tmp_path} --out {tmp_path}/new => has no results of whereformer compare
    """):
        assert message in fails(capsys, "merge", *arguments)
    empty = [tmp_path / name for name in ("empty", "empty2")]
    for folder in empty:  # as of comparisons that were interrupted in their first training
        folder.mkdir()
        (folder / "records.jsonl").write_bytes((first / "records.jsonl").read_bytes().splitlines(keepends=True)[0])
    refused = fails(capsys, "merge", *map(str, empty), "--out", str(tmp_path / "new"))
    assert "FOLDERS: expected at least one trained model, got none" in refused
    run(text, tmp_path / "other", "--batch-size=2", positions="none")
    refused = fails(capsys, "merge", str(first), str(tmp_path / "other"), "--out", str(tmp_path / "new"))
    assert f"{first} and {tmp_path}/other have different batch_size, 4 and 2" in refused
    for target, problem in (("/dev/zero", "expected a file, got a pipe, socket or device"), ("gone", "no such file")):
        (tmp_path / "disk" / "link").symlink_to(target)
        refused = fails(capsys, "merge", str(first), str(second), "--out", str(tmp_path / "new"))
        assert f"FOLDERS: {problem}: '{second}/models/link'" in refused
        (tmp_path / "disk" / "link").unlink()
    assert not (tmp_path / "new").exists()


def test_methods_start_from_the_same_backbone_and_differ_only_in_position():
    recipe = Compare(out="x", blocks="1x2", length=16, hidden_size=16)
    models = {name: encoders.build(recipe.config(name, 64), 5) for name in ("none", "tupe+t5", "rope+sinks", "hybrid")}
    assert [model.config.sinks for model in models.values()] == [False, False, True, False]
    assert count_parameters(models["rope+sinks"])["positional_parameters"] == 2
    backbone = models["none"].state_dict()
    for model in models.values():
        state = model.state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in backbone.items())
    reseeded = encoders.build(recipe.config("none", 64), 6).state_dict()
    assert not torch.equal(reseeded["encoder.layers.0.up.weight"], backbone["encoder.layers.0.up.weight"])


def flip_a_bit(out):
    file = out / "models" / "tisa-0" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    return {"train 0 tisa"}


def swap_models(out):
    for name, target in (("none-0", "x"), ("tisa-0", "none-0"), ("x", "tisa-0")):
        (out / "models" / name).rename(out / "models" / target)
    return {"train 0 none", "train 0 tisa"}


@pytest.mark.parametrize("damage", [flip_a_bit, pytest.param(swap_models, marks=pytest.mark.slow)])
def test_a_run_whose_model_is_gone_or_changed_is_done_again(text, tmp_path, capsys, damage):
    runs = run(text, tmp_path, positions="none,tisa")
    before = weights(tmp_path)
    expected = damage(tmp_path)
    capsys.readouterr()
    assert run(text, tmp_path, positions="none,tisa") == runs
    repeated = re.findall(r"repeating (train \d \w+): ", capsys.readouterr().out)
    assert set(repeated) == expected
    assert same(weights(tmp_path), before)


def test_other_settings_and_texts_do_not_mix_with_results_already_there(text, tmp_path, capsys):
    run(text, tmp_path / "out", positions="none")
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    words = ["compare", "--out", str(tmp_path / "out"), "--positions=none"]
    assert "steps 6, not 7" in fails(capsys, *words, "--data", text, *TINY[:-1], "--steps=7")
    assert "minutes None, not 3.0" in fails(capsys, *words, "--data", text, *TINY, "--minutes=3")
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before
    changed = tmp_path / "story.txt"
    changed.write_text("something else entirely. " * 2000)
    main([*words[:2], str(tmp_path / "own"), *words[3:], "--data", str(changed), *TINY])
    stamp = changed.stat()
    changed.write_text("something else ENTIRELY. " * 2000)  # of the same size and time
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    message = fails(capsys, *words[:2], str(tmp_path / "own"), *words[3:], "--data", str(changed), *TINY)
    assert "has results for a different text" in message


def test_what_fails_at_a_longer_length_fails_before_a_training(text, tmp_path, monkeypatch):
    """Such as a method of the user's own, or the memory."""
    real = compare.scoring.lm_score

    def score(model, batches):
        batches = list(batches)
        if batches[0]["input_ids"].shape[1] == 64:
            raise RuntimeError("no such long text")
        return real(model, batches)

    monkeypatch.setattr("whereformer.analysis.held_out.lm_score", score)
    monkeypatch.setattr(train, "train", lambda *_, **__: pytest.fail("it trains"))
    with pytest.raises(RuntimeError, match="no such long text"):
        run(text, tmp_path, positions="none")


def broken(monkeypatch, position, rates=(0.008,)):
    """Let the loss of a method not be finite at these rates."""
    real = train.train

    def diverging(model, batches, training, **options):
        if model.config.position == position and training.rate in rates:
            raise train.NotFiniteError.after(5, training.rate)
        return real(model, batches, training, **options)

    monkeypatch.setattr(train, "train", diverging)


def test_a_loss_that_is_not_finite_is_an_error_after_the_others_are_done(text, tmp_path, capsys, monkeypatch):
    broken(monkeypatch, "none")
    words = ["compare", "--data", text, "--out", str(tmp_path), "--positions=none,tisa", *TINY]
    message = fails(capsys, *words)
    assert "none, seed 0: the loss is not finite (NaN or inf) after 5 steps; 0.008 is too high, try 0.002" in message
    assert list(load(tmp_path)[1]) == ["tisa"]
    assert "the loss was not finite (NaN or inf): none." in (tmp_path / "report.html").read_text()


def test_a_rate_that_diverges_is_not_taken_and_a_method_may_have_none(text, tmp_path, monkeypatch, capsys):
    broken(monkeypatch, "tisa")
    runs = run(text, tmp_path / "a", "--steps=7", "--rate-factors=1,2", positions="none,tisa")
    assert runs["tisa"][0].rate == 0.016
    assert "tisa: losses of short runs by learning rate: 0.008: not finite, 0.016: " in capsys.readouterr().out
    broken(monkeypatch, "tisa", (0.008, 0.016))
    words = ["compare", "--data", text, "--out", str(tmp_path / "b"), "--positions=none,tisa", *TINY[1:]]
    message = fails(capsys, *words, "--steps=7", "--rate-factors=1,2")
    assert "the loss of 'tisa' is not finite (NaN or inf) at any of 0.008, 0.016; try 0.002" in message
    assert list(load(tmp_path / "b")[1]) == ["none"]


def test_short_trainings_have_the_warm_up_of_whole_ones(text, tmp_path, monkeypatch):
    """With their own, too high rates look worse than they are in a whole training."""
    real, arguments = train.build_schedule, []
    monkeypatch.setattr(train, "build_schedule", lambda *args: (arguments.append(args[2:]), real(*args))[1])
    run(text, tmp_path, "--steps=40", "--rate-factors=1,2", positions="none")
    assert arguments == [(4, 6), (4, 6), (4, 40)]


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        ({0.5: 5.9, 1.0: 5.8, 2.0: 5.8}, True),
        ({0.5: 5.76, 1.0: 5.8, 2.0: 5.76}, True),
        ({0.5: 5.7, 1.0: 5.8, 2.0: 5.9}, False),
        ({0.5: 5.9, 1.0: 5.8, 2.0: 5.7}, False),
        ({0.5: 5.9, 1.0: 5.8, 2.0: None}, False),
        ({0.5: 5.9, 1.0: None, 2.0: None}, False),
        ({0.5: 6.0, 1.0: 6.0, 2.0: 6.0}, False),
    ],
)
def test_short_trainings_are_for_methods_that_do_better_with_another_rate(losses, settled, tmp_path, monkeypatch):
    """Looks at each rate come first, whose rate rises for two thirds of their steps. Guessing has a loss of 6."""
    plans = []

    def fit(recipe, run, material, model, seed, plan, on_log, **options):
        plans.append((plan.rate, plan.steps, plan.warmup))
        if (loss := losses[plan.rate]) is None:
            raise train.NotFiniteError.after(3, plan.rate)
        return train.Progress(losses=[7.0] * (plan.steps - 4) + [loss] * 4)

    monkeypatch.setattr(Compare, "fit", fit)
    recipe = Compare(out=tmp_path, learning_rate=1.0, steps=400)
    material = SimpleNamespace(vocabulary=SimpleNamespace(size=64), guessing=6.0)
    trials = recipe.search_rate(SimpleNamespace(advance=None), material, "none")
    looks, short = ([(rate, *plan) for rate in losses] for plan in ((40, 27), (60, 40)))
    assert plans == (looks if settled else [*looks, *short])
    assert trials.steps == (40 if settled else 60)
    assert settled <= (trials.find_best(recipe.rates, 1.0) == 1.0)


def test_another_rate_than_the_usual_one_has_to_be_clearly_better():
    trials, rates = RateSearch([3.0, 2.45, 2.4, None], 60), [1.0, 2.0, 4.0, 8.0]
    assert trials.find_best(rates, usual=1.0) == 4.0
    assert trials.find_best(rates, usual=2.0) == 2.0
    # A usual rate that was not tried, or did not last, is that of its neighbor.
    assert trials.find_best(rates, usual=2.5) == 2.0
    assert trials.find_best(rates, usual=8.0) == 4.0
    assert RateSearch([None], 60).find_best([2.0], usual=2.0) is None
    assert RateSearch([3.0, 2.7], 60).find_best([0.5, 2.0], usual=1.0) == 0.5


def test_a_higher_rate_has_to_be_better_by_more_than_a_lower_one():
    # As t5 with 3,600 steps, which the higher rate left with a loss that was higher by 0.1.
    rates = [0.004, 0.008, 0.016]
    assert RateSearch([5.08, 4.77, 4.38], 60).find_best(rates, usual=0.008) == 0.008
    assert RateSearch([5.08, 4.77, 4.38], 60).find_best(rates, usual=0.016) == 0.016
    assert RateSearch([4.6, 4.77, 4.38], 60).find_best(rates, usual=0.008) == 0.004
    assert RateSearch([5.08, 4.77, 4.2], 60).find_best(rates, usual=0.008) == 0.016


@pytest.mark.parametrize(
    ("arguments", "expected"),
    refusals("""
        --positions tsia => --positions: unknown position method 'tsia'; did you mean 'tisa'?
        --positions , => --positions: expected at least one, got none
        --positions none,,rope => --positions: expected something between commas, got 'none,,rope'
        --causal --mask-rate 0.3 => --mask-rate: causal models mask nothing; leave it out
        --ray local: => --ray: expected auto, local, HOST:PORT or ray://HOST:PORT, got 'local:'
        --num-heads 5 => 5 heads do not divide hidden_size 64
        --rate-factors 9e5 --learning-rate 10 => --rate-factors: expected learning rates of at most 1e+06
        --preset modernbert --blocks x => --blocks: expected layers as '12', '1x12' or '4-4-4', got 'x'
        --lengths 32 => --lengths: expected at least the training length 64, got 32
        --lengths 65,66,67,68,69,70 => --lengths: expected at most 5, got 6
        --data no/such/file => --data: no such file or folder: 'no/such/file'
    """),
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, expected, tmp_path, capsys):
    assert expected in fails(capsys, "compare", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()


def test_other_lengths_are_judged(text, tmp_path):
    runs = run(text, tmp_path, "--lengths=48,24", positions="none,learned")
    assert all(len(run[0].scores) == 3 for run in runs.values())
    assert isinstance(runs["learned"][0].scores[1], str)
    assert "@24" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_encoder_is_a_presets_and_positions_are_what_differs(preset):
    recipe, expected = Compare(out="x", preset=preset, length=16, hidden_size=16), EncoderConfig.preset(preset)
    *configs, hybrid = (recipe.config(name, 64) for name in ("none", "rope", "hybrid"))
    of_hybrid = EncoderConfig.preset("hybrid", blocks=hybrid.blocks, decoder_layers=hybrid.decoder_layers)
    assert (hybrid.position, hybrid.windows) == (of_hybrid.position, of_hybrid.windows)
    for field in ("norm", "feed_forward", "biases", "hidden_act", "first_norm", "query_bias", "lm_head"):
        assert {getattr(config, field) for config in configs} == {getattr(expected, field)}, field
    assert [config.position for config in configs] == ["none", "rope"]
    assert all(config.position_options == {} for config in configs)
    assert {config.blocks for config in configs} == {PRESETS[preset].get("blocks", "4")}


def test_a_comparison_without_a_preset_normalizes_first_and_options_win_over_a_preset(text, tmp_path):
    config = Compare(out="x").config("none", 64)
    assert (config.norm, config.blocks, config.intermediate_size, config.decoder_layers) == ("pre", "4", 128, "0")
    assert Compare(out="x", blocks="1-1").config("none", 64).decoder_layers == "1"
    run(text, tmp_path, "--preset=funnel", "--blocks=1-1", positions="none")
    config = load_pretrained(tmp_path / "models" / "none-0", model_class=EncoderForMaskedLM).config
    assert (config.blocks, config.decoder_layers) == ("1-1", "2")
    assert (config.query_bias, config.hidden_act) == (False, "gelu_pytorch_tanh")


def test_too_little_text_for_the_length(text, tmp_path, capsys):
    out = tmp_path / "out"
    message = fails(capsys, "compare", "--data", text, "--out", str(out), "--length=4096", "--vocab-size=64")
    assert "--data: too little text" in message
    assert not out.exists()
    assert "expected at least 16384 of each" in message


@pytest.mark.slow
def test_every_method_can_be_compared(text, tmp_path):
    from whereformer import position_names
    from whereformer.positions import method_class

    runs = run(text, tmp_path, positions="all")
    assert list(runs) == position_names()
    fixed = {name for name, seeds in runs.items() if isinstance(seeds[0].scores[1], str)}
    assert fixed == {name for name in position_names() if not method_class(name).extrapolates}
    assert all(seeds[0].flops for seeds in runs.values())


PLUGIN = """
from whereformer.positions import PositionMethod, register

class Own(PositionMethod):
    "Nothing, by another name."

register("{name}", Own)
"""


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_method_of_ones_own_is_compared_and_another_version_is_refused(text, tmp_path, capsys, jobs):
    plugin, name, out = tmp_path / f"my_method{jobs}.py", f"own{jobs}", tmp_path / "out"
    flags = f"--plugin={plugin}", f"--jobs={jobs}"
    plugin.write_text(PLUGIN.format(name=name))
    try:
        run(text, out, positions="none")
        run(text, out, *flags, positions=f"none,{name}")
        output = capsys.readouterr().out
        assert "1 of 2 runs are already done" in output
        assert f"{name}, seed 0: held-out loss" in output
        assert f"--plugin={plugin}" in (out / "report.html").read_text()
        positions.METHODS.pop(name)
        plugin.write_text(PLUGIN.replace("Nothing", "Something else").format(name=name))
        line = fails(capsys, "compare", "--data", text, "--out", str(out), *TINY, *flags, f"--positions={name}")
        assert f"{out} has results for a different version of the plugin; choose another folder" in line
    finally:
        positions.METHODS.pop(name, None)


def test_other_commands_read_what_a_plugin_registers(text, tmp_path, capsys, monkeypatch):
    plugin, out = tmp_path / "my_method.py", tmp_path / "out"
    example = (Path(__file__).parents[2] / "examples" / "own_method.py").read_text()
    plugin.write_text(example)
    model, flag = str(out / "models" / "fading-0"), f"--plugin={plugin}"
    analyze = ["analyze", model, "--out", str(tmp_path / "analysis")]
    probe = ["probe", "--tasks=copy", "--positions=fading", "--steps=1", "--jobs=2", "--out", str(tmp_path / "probe")]
    try:
        run(text, out, flag, positions="none,fading")
        main(["positions", "fad*", flag])
        main([*analyze, flag])
        main([*probe, flag])
        assert capsys.readouterr().out.count("fading") > 5
        positions.METHODS.pop("fading")
        assert "a+b, and the methods that a --plugin registers" in fails(capsys, *analyze)
        plugin.write_text(example + "# changed")
        main([*analyze, flag])
        line = fails(capsys, *probe, flag)
        assert "probe has results for a different version of the plugin; choose another folder" in line
    finally:
        positions.METHODS.pop("fading", None)


def test_files_beside_a_plugin_that_it_imports_count(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # or files of the same second would pass for the same
    plugin = tmp_path / "my_method.py"
    plugin.write_text("from package import module\n" + PLUGIN.format(name="own"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("from .beside_it import A")
    (tmp_path / "package" / "__init__.py").write_text("")
    sources = []
    for content in ("A = 1", "A = 2"):
        (tmp_path / "package" / "beside_it.py").write_text(content)
        before = set(sys.modules)
        try:
            load_plugin(plugin)
            sources.append(next(name for name in sys.modules.keys() - before if name.startswith(PLUGIN_MODULE)))
        finally:
            positions.METHODS.pop("own", None)
            for name in sys.modules.keys() - before:
                del sys.modules[name]
    assert sources[0] != sources[1]


def test_where_models_go_is_tried_before_the_text_is_read(text, tmp_path, capsys):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tisa-0").touch()
    words = ["compare", "--data", text, "--out", str(tmp_path), "--positions=none,tisa", *TINY]
    line = fails(capsys, *words)
    assert line == f"whereformer: --out: expected a folder or nothing, got a file: '{tmp_path / 'models' / 'tisa-0'}'"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "--plugin: no such file: "),
        ("x = 1", "my_method.py registers no method; it must call whereformer.positions.register"),
        ("x = 1\nx = = 2", "my_method.py, line 2: invalid syntax"),
        (PLUGIN.format(name="rope"), "--plugin: my_method.py: name: 'rope' is already the name of"),
    ],
)
def test_a_bad_plugin_is_one_line(content, expected, tmp_path, capsys):
    plugin = tmp_path / "my_method.py"
    if content is not None:
        plugin.write_text(content)
    assert expected in fails(capsys, "compare", "--out", str(tmp_path / "out"), "--plugin", str(plugin))
    assert not (tmp_path / "out").exists()


def test_a_quick_comparison_reads_the_beginning_of_the_text(text, tmp_path, capsys):
    run(text, tmp_path, "--quick", "--characters=30000", positions="none")
    assert "up to 30,000 characters of " in capsys.readouterr().out
    assert "--quick --characters=30000" in (tmp_path / "report.html").read_text()


def test_a_size_has_other_defaults(monkeypatch):
    def sizes(*words):
        main(["compare", *words])
        recipe = recipes.pop()
        return recipe, (recipe.hidden_size, recipe.length, recipe.out.name, recipe.has_small_models)

    recipes = []
    monkeypatch.setattr("whereformer.cli.main.execute", lambda command, words: recipes.append(command))
    assert sizes()[1] == (64, 64, "compare", True)
    recipe, medium = sizes("--size", "medium", "--length", "128")
    assert medium == (512, 128, "compare-medium", False)
    config = recipe.config("none", recipe.vocab_size)
    assert 24e6 < sum(p.numel() for p in encoders.build(config, 0).parameters()) < 27e6
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert sizes()[1] == (64, 64, "compare", True)  # the default text is short
    recipe, medium = sizes("--data", "mine.txt", "--quick")
    assert medium == (512, 256, "compare-medium-quick", False)
    assert recipe == Compare(data="mine.txt", quick=True, **Compare.defaults_for({"data": "mine.txt", "quick": True}))
    assert sizes("--preset=funnel", "--size=medium")[0].config("none", 100).blocks == "4-4-4"
    assert sizes("--device", "cpu")[1] == sizes("--size=small")[1] == (64, 64, "compare", True)


def test_a_budget_chooses_the_steps_once(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "MIN_STEPS", 3)
    monkeypatch.setattr(Compare, "seconds_per_step", lambda *_: 0.05)
    words = ["--minutes=0.02", "--seeds=2", "--jobs=1"]
    # Nine tenths of 1.2 seconds; a step of both methods takes 0.1 seconds with each seed, and judging a tenth of that.
    runs = run(text, tmp_path, *words, positions="none,tisa")
    assert "0.02 minutes: 4 steps for each method" in capsys.readouterr().out
    assert [(len(seeds), len(seeds[0].losses)) for seeds in runs.values()] == [(2, 4)] * 2
    monkeypatch.setattr(Compare, "seconds_per_step", lambda *_: pytest.fail("measured twice"))
    assert run(text, tmp_path, *words, positions="none,tisa") == runs
    assert "4 of 4 runs are already done" in capsys.readouterr().out
    assert load(tmp_path)[0].find_problem((0, "tisa"), runs["tisa"][0]) is None  # what measures the models finds them
    words = ["compare", "--data", text, "--out", str(tmp_path), *TINY, "--minutes=3"]
    assert "has results with minutes 0.02, not 3.0" in fails(capsys, *words)


def test_a_budget_is_measured_and_an_error_names_one_that_is_enough(text, tmp_path, capsys):
    words = ["compare", "--data", text, "--out", str(tmp_path), *TINY, "--positions=none,tisa"]
    for minutes in ("1e-3", "2e-3"):  # the first has kept nothing
        line = fails(capsys, *words, f"--minutes={minutes}")
        assert 1e-3 < float(re.search(r"--minutes: expected at least (\S+) here, for 100 steps", line)[1]) < 10
