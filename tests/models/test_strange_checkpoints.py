"""Checkpoints of strangers: nothing outside their folder is read, and no memory is taken for sizes that they lack."""

import json
import math
from inspect import get_annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from whereformer import ElectraPretrainingConfig, Encoder, EncoderConfig, Seq2SeqConfig, load_attached, load_pretrained
from whereformer.errors import InputError
from whereformer.models.checkpoints.files import find_weights, read_header

STRANGE = [0, -1, 10**8, 10**19, 1.5, math.nan, math.inf, True, "12", "x", None, [], {}, [1], {"x": 1}]


@pytest.fixture
def folder(tmp_path):
    config = EncoderConfig(vocab_size=40, hidden_size=16, num_attention_heads=2, blocks="2")
    Encoder(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def nothing_is_built(monkeypatch):
    """Only models without memory may be built."""
    from torch import nn

    real = nn.Embedding.__init__

    def init(self, *arguments, **options):
        assert torch.get_default_device().type == "meta"
        real(self, *arguments, **options)

    monkeypatch.setattr(nn.Embedding, "__init__", init)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 10**8}, "expected 'embeddings.word.weight' of shape (100000000, 16), got (40, 16)"),
        ({"vocab_size": 10**19}, "vocab_size: expected at most 2147483647, got 10000000000000000000"),
        ({"max_position_embeddings": 10**8}, "expected 'position.weight' of shape (100000000, 16), got (512, 16)"),
        ({"intermediate_size": 2**22}, "of shape (16, 4194304), got"),
        ({"head_dim": 2**20}, "of shape (2097152"),
        ({"blocks": "10000000"}, "blocks: expected at most 1000 layers, got 10000000"),
        ({"blocks": "1" * 5000}, "blocks: expected layers as"),
        ({"blocks": "1" + "-1" * 10**6}, "blocks: expected layers as"),
        ({"position": "synthesizer", "max_position_embeddings": 2**31 - 1}, "config: a model with these sizes cannot"),
        ({"blocks": "900"}, "checkpoint: it has no 'encoder.layers.2.attention.query.weight', which this model needs"),
        ({"vocab_size": math.nan}, "vocab_size: expected an integer, got nan"),
        ({"num_labels": 10**9}, "num_labels: expected at most 65536, got 1000000000"),
        ({"id2label": 5}, "path_or_id: its config.json does not describe a model"),
        ({"position": "t5", "position_options": {"max_distance": 10**9}}, "max_distance: expected at most 1048576"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(folder, fields, message, nothing_is_built):
    change(folder, **fields)
    with pytest.raises(ValueError, match=r".*") as caught:
        load_pretrained(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(("value", "text"), [(3e38, "as large as 3e+38"), (math.nan, "not finite"), (-math.inf, "not")])
def test_weights_that_are_no_numbers_are_named(folder, value, text):
    state = load_file(folder / "model.safetensors")
    state["norm.weight" if "norm.weight" in state else "embeddings.norm.weight"][3] = value
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"^checkpoint: '.*norm.weight' has numbers .*{text[:6]}") as caught:
        load_pretrained(folder)
    assert text in str(caught.value)


OUTSIDE = "../model.safetensors", "/etc/passwd", "missing.safetensors", "a/b.safetensors", "a\\b.safetensors", ".."


@pytest.mark.parametrize("name", [*OUTSIDE, "x.bin", "\x1b[2J", 5, []])
def test_an_index_names_files_of_its_own_folder(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    with pytest.raises(InputError) as caught:
        load_pretrained(folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", "[]", '{"weight_map": 3}', '{"weight_map": {}}', "1" * 5000])
def test_a_damaged_index_is_one_line(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"^path_or_id: .*model\.safetensors\.index\.json"):
        find_weights(folder)


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[]", b"[" * 100_000, b"1" * 5000, None])
def test_a_damaged_config_is_one_line(folder, content):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir() if content is None else (folder / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"^path_or_id: .*config\.json") as caught:
        load_pretrained(folder)
    assert str(caught.value).isprintable()


def test_the_header_takes_no_memory(folder):
    header = read_header(find_weights(folder))
    state = load_file(folder / "model.safetensors")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in header.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in state.items()
    }
    assert all(tensor.is_meta for tensor in header.values())


def test_random_numbers_are_those_of_a_model_that_is_built_once(folder):
    torch.manual_seed(1)
    load_pretrained(folder, "tisa")
    after = torch.rand(3)
    torch.manual_seed(1)
    Encoder(EncoderConfig.from_dict({**json.loads((folder / "config.json").read_text()), "position": "tisa"}))
    torch.testing.assert_close(torch.rand(3), after, rtol=0, atol=0)


CONFIGS = {
    EncoderConfig: {"hidden_size": 16, "num_attention_heads": 2, "blocks": "1"},
    ElectraPretrainingConfig: {"hidden_size": 16, "num_attention_heads": 2, "blocks": "1"},
    Seq2SeqConfig: {"hidden_size": 16, "num_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1},
}


@settings(max_examples=150)
@given(st.data())
def test_a_configuration_is_one_or_an_input_error(data):
    kind = data.draw(st.sampled_from(list(CONFIGS)))
    names = [name for base in kind.__mro__ if "whereformer" in base.__module__ for name in get_annotations(base)]
    values = st.one_of(st.sampled_from(STRANGE), st.integers(), st.floats(), st.text(max_size=9))
    fields = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=2))
    try:
        config = kind.from_dict({**CONFIGS[kind], **fields})
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017  # it need not fail
    else:
        assert type(config.vocab_size) is int
        assert 1 <= config.vocab_size < 2**31


@settings(max_examples=60)
@given(position=st.integers(0, 400), by=st.binary(min_size=1, max_size=4))
def test_a_damaged_header_is_an_error_of_one_kind(tmp_path_factory, position, by):
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.int64)}, file)
    content = bytearray(file.read_bytes())
    content[position : position + len(by)] = by
    file.write_bytes(content)
    try:
        header = read_header([file])
    except OSError as error:
        assert str(error).startswith(f"path_or_id: {file} is not safetensors")  # noqa: PT017  # as above
    else:
        assert all(tensor.is_meta for tensor in header.values())


def test_weights_of_8_bits_are_refused(folder):
    state = load_file(folder / "model.safetensors")
    state["embeddings.word.weight"] = state["embeddings.word.weight"].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"^checkpoint: 'embeddings.word.weight' is torch.float8_e4m3fn, expected"):
        load_pretrained(folder)


def test_positions_that_are_one_number_are_refused(tmp_path):
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(config).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor.flatten()[0].clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"^config: a model with these sizes cannot be built \("):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "paged|evil/kernel@main:attention"},
        {"experts_implementation": "evil/kernel"},
        {"text_config": {"attn_implementation": {"": "evil/kernel"}}},
    ],
)
def test_kernels_on_the_hub_are_never_asked_for(folder, fields):
    change(folder, **fields)
    for load in (load_pretrained, lambda folder: load_attached(folder, BertModel)):
        with pytest.raises(InputError, match=r"implementation: code from the Hub is not run, got .*evil/kernel"):
            load(folder)
    Encoder.from_pretrained(folder)  # our models have no such kernels
