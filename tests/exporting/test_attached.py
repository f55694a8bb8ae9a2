"""Attached models as exported programs, at batches and lengths that were not traced."""

import pytest
import torch
import transformers
from torch.export import Dim

from tests.models.test_attach import MODELS, SIZES, batch, make
from whereformer import Encoder, attach
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.exporting import to_onnx, to_torch

from .models import exportable
from .test_exporting import largest_difference

BERT = transformers.BertForSequenceClassification


def classifier():
    return BERT(transformers.BertConfig(**SIZES | {"num_hidden_layers": 1}, num_labels=3))


def two_layers(name):
    """One of the models with two layers, since each one more is as many operations to trace."""
    model = MODELS[name]()
    model.config.num_hidden_layers = 2
    # ModernBERT has a window in every second layer.
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types = kinds[:2]
    return make(type(model)(model.config))


def check(model, file):
    found = to_torch(model, file) if file.endswith(".pt2") else to_onnx(model, file)
    assert largest_difference(model, found) < 3e-5 > found.error
    return found


CASES = [
    ("bert", "tisa", True, 40),
    ("albert", "t5", False, 40),
    ("roberta", "shaw", True, 38),
    ("modernbert", "none", True, None),
    ("distilbert", "rope", False, 40),
    ("electra", "tisa+shaw", True, 40),
    ("gpt2", "tisa", True, 40),
    ("llama", "alibi", True, None),
]


QUICK = {("albert", "pt2"), ("modernbert", "onnx")}


@pytest.mark.parametrize(
    ("name", "position", "keep", "longest", "kind"),
    [
        pytest.param(*case, kind, marks=[] if (case[0], kind) in QUICK else pytest.mark.slow)
        for case in CASES
        for kind in ("pt2", "onnx")
    ],
)
def test_every_batch_and_length(name, position, keep, longest, kind, tmp_path):
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    found = check(attach(two_layers(name), position, keep_absolute=keep), str(tmp_path / f"model.{kind}"))
    assert (found.outputs, found.min_length, found.max_length) == (("last_hidden_state",), 1, longest)


@pytest.mark.parametrize(
    "model", [lambda: make("bert"), lambda: attach(make("t5"), "none"), lambda: attach(make("vit"), "none")]
)
def test_other_models_are_refused(model, tmp_path):
    with pytest.raises(InputError, match=r"^model: expected "):
        to_torch(model(), tmp_path / "model.pt2")


def test_the_command_takes_a_folder_with_a_method_attached(tmp_path, capsys):
    model = attach(make(classifier()), "tisa", keep_absolute=False)
    model.save_pretrained(tmp_path)
    main(["export", str(tmp_path), "--to", "torch"])
    assert "outputs: logits, float32" in capsys.readouterr().out
    inputs = batch(model) | {"token_type_ids": torch.zeros(3, 12, dtype=torch.long)}
    (logits,) = torch.export.load(tmp_path / "torch" / "model.pt2").module()(**inputs)
    torch.testing.assert_close(logits, model(**inputs).logits, rtol=0, atol=1e-5)


def test_a_folder_that_names_no_class_is_refused(tmp_path, capsys):
    attach(make("bert"), "tisa").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"BertModel"', '"Nonsense"'))
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path), "--to", "torch"])
    assert ended.value.code == 2
    assert "Nonsense" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_jit_tracing_says_what_to_do_instead():
    ids = torch.randint(3, 50, (2, 7))
    with pytest.raises(TypeError, match=r"^torch.jit.trace would fix the lengths; use torch.export.export"):
        torch.jit.trace(attach(make("bert"), "tisa"), (ids, torch.ones_like(ids)), strict=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_torch_onnx_takes_models_as_they_are(kind):
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    model = exportable(Encoder, "tisa", blocks="1") if kind == "ours" else attach(two_layers("bert"), "tisa").eval()
    ids = torch.randint(3, 50, (2, 7))
    axes = {0: "batch", 1: "length"}
    shapes = {"input_ids": axes, "attention_mask": axes}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, verbose=False, dynamic_shapes=shapes)
    other = {name: torch.cat((each, each))[:, :5] for name, each in inputs.items()}
    found = program(**other)[0]
    torch.testing.assert_close(found, model(**other).last_hidden_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_torch_export_by_hand_leaves_the_batch_free(name):
    model = attach(two_layers(name), "tisa")
    inputs = batch(model)
    axes = {0: Dim("batch"), 1: Dim("length", max=40)}
    program = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, axes), strict=False)
    other = {"input_ids": torch.randint(3, 50, (5, 17)), "attention_mask": torch.ones(5, 17, dtype=torch.long)}
    found = program.module()(**other).last_hidden_state
    torch.testing.assert_close(found, model(**other).last_hidden_state, rtol=0, atol=1e-5)
