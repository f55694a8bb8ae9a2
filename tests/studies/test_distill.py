"""whereformer distill-positions, end to end at a size that takes seconds."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import whereformer
from tests.failing import fails, refusals
from whereformer import EncoderConfig, EncoderForMaskedLM, EncoderForTokenClassification, load_pretrained
from whereformer.cli.main import main
from whereformer.data.tokenizers import fit_tokenizer
from whereformer.errors import InputError
from whereformer.lab import manifest
from whereformer.lab.training.trainer import quiet_transformers
from whereformer.studies.distill.results import DistillResults


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    """A masked LM with learned positions, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = fit_tokenizer([Path(text).read_text()], 64)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "blocks": "2", "initializer_range": 0.3}
    model = EncoderForMaskedLM(EncoderConfig(**sizes, max_position_embeddings=32))
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    return str(folder)


@pytest.fixture
def pairs(tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"a": "the cat saw the dog", "b": f"the {word} saw the dog", "like": 5.0 - i}
        for i, word in enumerate(["cat", "dog", "king"])
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_it_fits_judges_and_saves(folder, text, pairs, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["distill-positions", folder, "--data", text, "--tokens", "600", "--length", "24", "--kernels", "1,2"]
    main([*command, "--pairs", pairs, "--text", "a,b", "--label", "like", "--out", str(out)])
    results = json.loads((out / "results.json").read_text())
    assert list(results["scores"]) == ["as trained", "without positions", "S=1", "S=2"]
    trained, dropped = results["scores"]["as trained"], results["scores"]["without positions"]
    assert trained["similarity"] == pytest.approx(1, abs=1e-5)
    assert dropped["similarity"] < 0.999
    assert set(trained) == {"similarity", "masked_lm_loss", "masked_lm_accuracy", "spearman"}
    assert all(0 < share <= 1 for layers in results["explained"].values() for heads in layers for share in heads)
    assert set(results["explained"]) == {"S=1", "S=2"}
    card = (out / "model" / "README.md").read_text()
    assert f"`{folder}`, that was changed. With 2 kernels per head" in card
    assert f"| S=2 | {results['scores']['S=2']['similarity']:.3f} |" in card
    printed = capsys.readouterr().out
    assert "without positions" in printed
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
    saved = load_pretrained(out / "model")
    assert isinstance(saved, EncoderForMaskedLM)
    assert saved.config.position == "tisa"
    assert saved.encoder.position.amplitude.shape == (2, 2, 2)
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (out / "model" / name).read_text() == Path(folder, name).read_text()
    assert (out / "model" / "tokenizer.json").exists()
    text = results["text"]
    assert (
        manifest.problem(out / "model", {"settings": {"model": folder, "kernels": 2, "text": text}}, alone=True) is None
    )
    assert manifest.problem(out / "model", {"settings": {}}) == "it was saved with other settings"
    (out / "model" / "tokenizer.json").write_text("{}")
    assert "tokenizer.json was changed" in manifest.problem(
        out / "model", {"settings": {"model": folder, "kernels": 2, "text": text}}
    )


def test_the_function_does_what_the_command_does(folder, text, tmp_path):
    sizes = ["--tokens", "600", "--length", "24", "--kernels", "1"]
    main(["distill-positions", folder, "--data", text, *sizes, "--out", str(tmp_path)])
    by_command = DistillResults.load(tmp_path)
    results = whereformer.distill_positions(model=folder, data=text, tokens=600, length=24, kernels=[1], quiet=True)
    assert (results.scores, results.explained) == (by_command.scores, by_command.explained)
    assert "With 1 kernels per head, the model's states have a similarity of" in str(results)
    assert "<table" in results._repr_html_()
    with pytest.raises(InputError, match="model: expected str, got none"):
        whereformer.distill_positions()


@pytest.mark.parametrize(
    ("options", "message"),
    refusals("""
        --kernels 0 => --kernels: expected numbers from 1 to 16 separated by commas, got '0'
        --text a,b => --text: only with --pairs: it names a column of that table
        --length 2 => --length: expected
        --tokens 20 => --tokens: expected at least 4 windows
    """),
)
def test_bad_options_are_one_line(folder, text, tmp_path, capsys, options, message):
    assert message in fails(
        capsys, "distill-positions", folder, "--data", text, "--out", str(tmp_path / "out"), *options
    )


def test_bad_pairs_are_one_line(folder, pairs, tmp_path, capsys):
    common = ["distill-positions", folder, "--out", str(tmp_path / "out"), "--pairs", pairs]
    assert "--text: expected two columns, such as a,b, got 'a'" in fails(
        capsys, *common, "--text", "a", "--label", "like"
    )
    assert "has no column 'c'; it has a, b, like" in fails(capsys, *common, "--text", "a,c", "--label", "like")
    assert "--label: expected numbers, got 'the cat saw the dog' in row 1" in fails(
        capsys, *common, "--text", "a,b", "--label", "a"
    )


def test_a_model_without_a_tokenizer_is_refused(text, tmp_path, capsys):
    config = EncoderConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, blocks="1")
    with quiet_transformers():
        EncoderForMaskedLM(config).save_pretrained(tmp_path / "alone")
    line = fails(capsys, "distill-positions", str(tmp_path / "alone"), "--data", text, "--out", str(tmp_path / "out"))
    assert line.startswith(f"whereformer: MODEL: no tokenizer can be read for {tmp_path / 'alone'}")


def test_models_without_positions_are_refused(tmp_path, text, capsys):
    for position, blocks, reason in (("none", "2", "it knows no positions"), ("learned", "1-1", "doesn't pool")):
        place = tmp_path / blocks
        config = EncoderConfig(
            vocab_size=64,
            hidden_size=16,
            num_attention_heads=2,
            blocks=blocks,
            decoder_layers="0" if blocks == "2" else "1",
            position=position,
        )
        with quiet_transformers():
            EncoderForMaskedLM(config).save_pretrained(place)
        assert reason in fails(capsys, "distill-positions", str(place), "--data", text, "--out", str(tmp_path / "o"))


def test_a_model_of_every_class_gets_a_card(folder, text, tmp_path):
    model = EncoderForTokenClassification.from_pretrained(folder, num_labels=3)
    with quiet_transformers():
        model.save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "model")
    options = {"data": text, "tokens": 600, "length": 24, "kernels": "1", "quiet": True}
    whereformer.distill_positions(model=tmp_path / "model", out=tmp_path / "out", **options)
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card
    assert "AutoModelForTokenClassification.from_pretrained" in card
