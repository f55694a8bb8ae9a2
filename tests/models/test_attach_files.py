"""Attached models in files: what is saved is loaded, and damaged or foreign checkpoints are refused."""

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from whereformer import attach, detach, load_attached
from whereformer.errors import InputError

from .peers import MODELS, NAMED, SIZES, attach_unverified, close, make, refused, states


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", NAMED)
def test_saves_and_loads(name, keep, tmp_path):
    position = "tisa" if keep and name == "modernbert" else "tisa+rope"
    model = attach_unverified(make(name), position, keep_absolute=keep, num_kernels=3)
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path, transformers.AutoModel)
    assert type(loaded) is type(model)
    assert loaded.config.whereformer == model.config.whereformer
    assert not loaded.training
    torch.testing.assert_close(states(loaded), states(model), rtol=0, atol=0)
    assert list(loaded.state_dict()) == list(model.state_dict())


def test_pickles_are_not_opened(tmp_path, monkeypatch):
    model = attach_unverified(make("bert"), "tisa")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("opened a pickle"))
    for options in ({}, {"use_safetensors": False}):
        with pytest.raises(OSError, match="safetensors"):
            load_attached(tmp_path, transformers.AutoModel, **options)


def test_a_method_that_is_too_large_to_count_is_refused(tmp_path):
    attach_unverified(make("bert"), "synthesizer", content="add").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["whereformer"]["options"]["max_length"] = 2**30
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"^path_or_id: .*too large to build"):
        load_attached(tmp_path, transformers.AutoModel)


def test_heads_change_and_files_are_split(tmp_path, caplog):
    torch.manual_seed(0)
    model = attach_unverified(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval(), "tisa")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for model_class in (transformers.AutoModelForTokenClassification, transformers.BertModel):
        with caplog.at_level(logging.WARNING):
            loaded = load_attached(tmp_path, model_class, dtype=torch.float64)
        base = loaded if model_class is transformers.BertModel else loaded.bert
        torch.testing.assert_close(base.whereformer.center, model.bert.whereformer.center.double())
        assert ("classifier.weight" in caplog.text) is not (model_class is transformers.BertModel)
        caplog.clear()
    base.save_pretrained(tmp_path / "base")
    again = load_attached(tmp_path / "base", transformers.AutoModelForMaskedLM, dtype=torch.float32)
    torch.testing.assert_close(again.bert.whereformer.center, model.bert.whereformer.center)


@pytest.mark.parametrize("name", ["whereformer.amplitude", "encoder.layer.0.attention.self.query.weight"])
def test_weights_in_other_numbers_are_refused(name, tmp_path):
    attach_unverified(make("bert"), "tisa").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name].to(torch.int64)
    save_file(weights, file, {"format": "pt"})
    with refused(rf"^checkpoint: '{name}' is torch.int64, expected floating-point numbers of 16"):
        load_attached(tmp_path, transformers.AutoModel)


def test_loading_what_was_not_attached(tmp_path):
    model = make("bert")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"^path_or_id: nothing was attached"):
        load_attached(tmp_path / "plain", transformers.AutoModel)
    model.config.whereformer = {"position": "tisa", "keep_absolute": True, "options": {}}
    model.save_pretrained(tmp_path / "lost")
    with pytest.raises(ValueError, match=r"^path_or_id: expected 90 values for 'tisa', got 0$"):
        load_attached(tmp_path / "lost", transformers.AutoModel)
    for kind in (transformers.RobertaModel, transformers.GPT2Model, nn.Linear):
        with pytest.raises(InputError, match=rf"^model_class: expected a class .* for 'bert', got {kind.__name__}$"):
            load_attached(tmp_path / "lost", kind)
    attach_unverified(model, "tisa", share_layers=True)
    model.config.whereformer["options"] = {}
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"^path_or_id: expected 90 values for 'tisa', got 30$"):
        load_attached(tmp_path / "other", transformers.AutoModel)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 10**9}, "num_labels: expected at most 65536, got 1000000000"),
        ({"hidden_size": 16.0}, "path_or_id: its config.json does not describe a model (StrictDataclass"),
        ({"hidden_size": [[[]]]}, "path_or_id: its config.json does not describe a model (StrictDataclass"),
        (
            {"whereformer": {"position": "tisa", "keep_absolute": "no", "options": {}}},
            "keep_absolute: expected True or False, got 'no'",
        ),
        (
            {"whereformer": {"position": "tupe", "keep_absolute": True, "options": {"max_length": 2**31 - 1}}},
            "path_or_id: expected 34",
        ),
    ],
)
def test_a_configuration_of_other_hands_is_refused(fields, message, tmp_path):
    attach(make("bert"), "tisa").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(InputError) as caught:
        load_attached(tmp_path, transformers.AutoModel)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_a_number_that_ends_in_layers_may_be_of_other_layers(name, tmp_path):
    """max_window_layers of Qwen is 28, whatever the number of layers."""
    config = getattr(transformers, f"{name}Config")(**SIZES | {"num_hidden_layers": 2}, num_key_value_heads=1)
    model = attach_unverified(getattr(transformers, f"{name}Model")(config).eval(), "tisa")
    model.save_pretrained(tmp_path)
    loaded = load_attached(tmp_path, type(model)).eval()
    ids = torch.randint(3, 50, (2, 9))
    assert torch.equal(loaded(ids)[0], model(ids)[0])
    file = tmp_path / "config.json"
    described = json.loads(file.read_text())
    too_many = (
        rf"^checkpoint: it has {len(model.state_dict())} tensors, but its config.json describes a model with more than"
    )
    for layers, message in (
        (900, too_many),
        (10**9, "^num_hidden_layers: expected at most 1000 layers, got 1000000000$"),
    ):
        file.write_text(json.dumps({**described, "num_hidden_layers": layers, "layer_types": None}))
        with pytest.raises(InputError, match=message):
            load_attached(tmp_path, type(model))
    file.write_text(json.dumps({**described, "text_config": {"num_hidden_layers": 10**9}}))
    with pytest.raises(InputError, match=r"^num_hidden_layers: expected at most 1000 layers"):
        load_attached(tmp_path, type(model))


def test_layers_that_are_not_in_the_checkpoint_are_refused(tmp_path):
    attach_unverified(make("bert"), "tisa").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if ".query." not in name}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"^path_or_id: the checkpoint has no 'encoder.layer.0.*, so it was not"):
        load_attached(tmp_path, transformers.AutoModel)


HEADS = {
    "multiple choice": (transformers.BertForMultipleChoice, "bert", "tisa", {"input_ids": (2, 3, 7)}),
    "T5's classifier": (transformers.T5ForSequenceClassification, "t5", "none", {"input_ids": (2, 7)}),
    "BART's classifier": (transformers.BartForSequenceClassification, "bart", "tisa", {"input_ids": (2, 7)}),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_take_inputs_of_another_form(name, tmp_path):
    """Their layers are found by running the base model."""
    kind, base, position, shapes = HEADS[name]
    model = make(kind(MODELS[base]().config))
    ids = {key: torch.randint(3, 50, shape) for key, shape in shapes.items()}
    for tensor in ids.values():
        tensor[..., -1] = model.config.eos_token_id if base != "bert" else 3
    before = model(**ids).logits
    after = attach_unverified(model, position)(**ids).logits
    assert torch.allclose(after, before, rtol=1e-4, atol=1e-4) == (position == "none")
    model.save_pretrained(tmp_path)
    close(load_attached(tmp_path, kind).eval()(**ids).logits, after)
    close(detach(model)(**ids).logits, before)
