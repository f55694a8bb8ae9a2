"""Fine-tuning with a class for each word."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.failing import fails
from tests.studies.finetuning import save_model, save_words
from whereformer import EncoderForTokenClassification
from whereformer.cli.main import main
from whereformer.data.rows import tokenized
from whereformer.data.words import WordTask
from whereformer.studies.finetune.models import fresh, load_tokenizer
from whereformer.studies.finetune.settings import TuningSettings
from whereformer.studies.finetune.train import predict
from whereformer.studies.finetune.variants import Variant

OPTIONS = ["--seeds=1", "--batch-size=8", "--kernels=2", "--device=cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def test_it_learns_padded_and_packed(model, tmp_path):
    files, found = save_words(tmp_path), {}
    for name in ("padded", "packed"):
        more = ["--packed"] if name == "packed" else []
        out = f"--out={tmp_path / name}"
        main(["finetune", "--model", model, *files, *OPTIONS, "--epochs=15", "--learning-rate=0.01", *more, out])
        results = json.loads((tmp_path / name / "results.json").read_text())
        assert results["tasks"]["train"]["classes"] == ["B-noun", "B-verb", "O"]
        assert results["tasks"]["train"]["metrics"] == ["span_f1", "span_precision", "span_recall"]
        found[name] = results["runs"]["train"]["learned+tisa, S=2"]["0"]
        assert found[name]["scores"][""]["span_f1"] > 0.95
    losses = [[point["loss"] for point in run["train_loss"][:3]] for run in found.values()]
    # Dropout differs; with it, the first losses are of the same size.
    np.testing.assert_allclose(*losses, rtol=0.2)
    assert "span_f1" in (tmp_path / "padded" / "report.html").read_text()


@pytest.mark.parametrize("blocks", ["2", "1-1"])
def test_predictions_are_those_of_a_row_alone(tmp_path, blocks):
    funnel = {"blocks": blocks, "decoder_layers": "1", "position": "rope"} if "-" in blocks else {}
    folder = save_model(tmp_path / "model", **funnel)
    save_words(tmp_path, 12)
    data = WordTask(tmp_path / "train.jsonl", tmp_path / "judged.jsonl", "tokens", "tags").load()
    tokenizer = load_tokenizer(folder, None)
    model = fresh(folder, Variant("own", None), 3, 0, per_word=True).eval()
    assert isinstance(model, EncoderForTokenClassification)
    rows = tokenized(data.judged[""], tokenizer, None, model.config, regression=False, per_word=True)
    # A funnel pools a row's last token with the padding after it, if there is any.
    found = {"padded": predict(model, rows, TuningSettings(batch_size=1 if funnel else 5))}
    if not funnel:
        found["packed"] = predict(model, rows, TuningSettings(batch_size=5, packed=True))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for number, words in enumerate(data.judged[""].texts):
        encoded = tokenizer(list(words), is_split_into_words=True, return_tensors="pt")
        owners = encoded.word_ids()
        first = [owners.index(word) for word in range(len(words))]
        inputs = {"input_ids": encoded["input_ids"]}
        if rows.end:
            padding = torch.full((1, rows.end), tokenizer.pad_token_id)
            inputs = {"input_ids": torch.cat([encoded["input_ids"], padding], 1)}
            inputs["attention_mask"] = (torch.arange(inputs["input_ids"].shape[1]) < len(owners)).long()[None]
        with torch.no_grad():
            expected = model(**inputs).logits[0, first]
        for logits in found.values():
            np.testing.assert_allclose(logits[number], expected, atol=1e-5)
    assert rows.classes_of_words() == data.judged[""].labels


def test_what_does_not_fit_is_named(model, tmp_path, capsys):
    files = save_words(tmp_path, 4)
    start = ["finetune", "--model", model, *files, f"--out={tmp_path / 'out'}"]
    assert "--per-word: words have classes, not numbers" in fails(capsys, *start, *OPTIONS, "--regression")
    line = fails(capsys, *start, *OPTIONS, "--text=tokens,tags")
    assert "--text: expected one column with --per-word, got 'tokens,tags'" in line
    line = fails(capsys, "finetune", "--model", model, "--task=cola", "--per-word")
    assert "--per-word: only with --train" in line
    funnel = save_model(tmp_path / "funnel", blocks="1-1", decoder_layers="1", position="rope")
    config = json.loads((tmp_path / "funnel" / "config.json").read_text())
    (tmp_path / "funnel" / "config.json").write_text(json.dumps({**config, "decoder_layers": "0"}))
    line = fails(capsys, *start, "--model", funnel, *OPTIONS, "--position=own")
    assert "a prediction for every token needs at least '1' where blocks pool" in line


def test_a_row_whose_words_have_no_token_is_named(model, tmp_path, capsys):
    files = save_words(tmp_path, 4)
    with (tmp_path / "judged.jsonl").open("a") as judged:
        judged.write("\n" + json.dumps({"tokens": ["\u200b", "\u200b"], "tags": ["O", "O"]}))
    line = fails(capsys, "finetune", "--model", model, *files, f"--out={tmp_path / 'out'}", *OPTIONS)
    assert "--text: no word of ('\\u200b', '\\u200b') has a token" in line
