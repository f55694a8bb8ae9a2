"""Funnel-Transformers of transformers as ours: the same numbers, from files."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import FunnelConfig
from transformers.models.funnel import modeling_funnel

from whereformer import Encoder, EncoderConfig, load_pretrained
from whereformer.errors import InputError

from .originals import FUNNEL, rewrite

MODELS = ["Model", "BaseModel", *(f"For{task}" for task in ("MaskedLM", "PreTraining", "SequenceClassification"))]
MODELS += ["ForTokenClassification"]
OUTPUTS = ("last_hidden_state", "logits")


def theirs(name, **options):
    torch.manual_seed(0)
    return getattr(modeling_funnel, f"Funnel{name}")(FunnelConfig(**FUNNEL, **options)).eval()


def batch(length=21):
    """Token ids, types with [CLS]'s own, and a mask that pads the second row."""
    ids = torch.randint(1, 40, (2, length), generator=torch.Generator().manual_seed(1))
    types = (torch.arange(length) > length // 2).long().expand(2, -1).clone()
    types[:, 0] = 2
    mask = torch.arange(length) < torch.tensor([[length], [length - 6]])
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask.long()}


@torch.no_grad()
def outputs(model, inputs):
    out = model(**inputs)
    return [getattr(out, name) for name in OUTPUTS if name in out]


def refuses(error, message, *arguments, **options):
    with pytest.raises(error, match=message):
        load_pretrained(*arguments, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention_type", ["relative_shift", pytest.param("factorized", marks=pytest.mark.slow)])
def test_the_same_outputs(name, attention_type, tmp_path):
    original = theirs(name, attention_type=attention_type)
    original.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", mask_pooling="all")
    expected = outputs(original, batch())
    assert expected
    for actual, golden in zip(outputs(ours, batch()), expected, strict=True):
        torch.testing.assert_close(actual, golden, rtol=2e-5, atol=2e-5)
    ours.save_pretrained(tmp_path / "ours")
    again = load_pretrained(tmp_path / "ours")
    assert type(again) is type(ours)
    torch.testing.assert_close(outputs(again, batch()), outputs(ours, batch()))


@pytest.mark.parametrize(
    ("options", "half", "quarter"),
    [
        # Behind [CLS] are the pairs (1, 2) to (13, 14), and 15 is dropped: of 12 real tokens 11 has a neighbor that is
        # none. Then come three pairs, of which the last stands for tokens 9 to 12, and what is left is dropped again.
        ({}, [1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1]),
        # transformers' masks lose 11 in the first halving, and 9 and 10 with it in the second.
        ({"mask_pooling": "all"}, [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0]),
    ],
)
def test_masks_are_the_authors_unless_asked_otherwise(options, half, quarter, tmp_path):
    theirs("Model").save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, **options)
    masks = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: masks.append(args[2].key_mask.int().tolist()))
    full_mask = [1] * 12 + [0] * 4
    outputs(model, {"input_ids": torch.ones(1, 16, dtype=torch.long), "attention_mask": torch.tensor([full_mask])})
    # A block's first layer looks at what its queries were pooled from; the last block has one layer, run twice.
    assert masks == [[mask] for mask in (full_mask, full_mask, half, half, quarter, full_mask, full_mask)]


def test_types_that_have_no_score_are_refused():
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "blocks": "1-1"}
    model = Encoder(EncoderConfig(**sizes, position="transformer_xl", segments="attention"))
    with pytest.raises(ValueError, match="token_type_ids: expected types from 0 to 2, got 5"):
        model(torch.ones(1, 4, dtype=torch.long), token_type_ids=torch.tensor([[2, 0, 0, 5]]))


@pytest.mark.parametrize(
    "layout",
    [
        {"block_sizes": [2], "block_repeats": None},
        {"block_sizes": [1, 1], "block_repeats": [2, 1]},
        {"block_sizes": [1, 1], "block_repeats": None, "num_decoder_layers": 0},
    ],
)
def test_a_decoder_that_is_not_as_ours_is_refused(layout, tmp_path):
    for name in ("Model", "BaseModel"):
        original = getattr(modeling_funnel, f"Funnel{name}")(FunnelConfig(**{**FUNNEL, **layout})).eval()
        original.save_pretrained(tmp_path)
        if name == "Model":
            refuses(ValueError, r"^block_sizes: expected a decoder with layers after several .*$", tmp_path)
    actual = outputs(load_pretrained(tmp_path, mask_pooling="all"), batch())
    torch.testing.assert_close(actual, outputs(original, batch()), rtol=2e-5, atol=2e-5)


def test_a_funnels_configuration_may_leave_out_defaults(tmp_path):
    theirs("BaseModel", hidden_act="gelu_new").save_pretrained(tmp_path)
    expected = load_pretrained(tmp_path).config.to_dict()
    rewrite(tmp_path, hidden_act=None, attention_type=None)
    assert load_pretrained(tmp_path).config.to_dict() == expected
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "funnel", "architectures": ["FunnelBaseModel"]}))
    refuses(ValueError, r"of shape \(30522, 768\), got \(40, 16\)|it has no 'encoder", tmp_path)


def test_fewer_layers_than_there_are_have_to_be_asked_for(tmp_path):
    theirs("Model").save_pretrained(tmp_path)
    dropped = load_pretrained(tmp_path, blocks="1-2", decoder_layers="2").loading_report.dropped
    assert dropped
    assert all(name.startswith("encoder.blocks.2.0.") for name in dropped)
    rewrite(tmp_path, block_sizes=[1, 2], block_repeats=[1, 1])
    refuses(ValueError, r"^checkpoint: it has 'encoder.blocks.2.0.attention.k_head.bias', but a model with", tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    theirs("BaseModel").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    complete = file.read_bytes()
    for content in (complete[:-100], b"version https://git-lfs.github.com/spec/v1\nsize 1000\n"):
        file.write_bytes(content)
        message = r"^path_or_id: .*model.safetensors is not safetensors, or not all of it was downloaded \(.*\)$"
        refuses(OSError, message, tmp_path)
    rewrite(tmp_path, d_model="wide")
    message = r"^path_or_id: its config.json does not describe a model .*'d_model' expected int, got str"
    refuses(ValueError, message, tmp_path)


def test_bad_checkpoints(tmp_path):
    model = theirs("Model")
    model.save_pretrained(tmp_path)
    refuses(ValueError, "position 'tisa' has no option 'kernels'", tmp_path, "tisa", kernels=3)
    refuses(ValueError, r"checkpoint: expected .* of shape .*, got .*; options may", tmp_path, intermediate_size=32)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refuses(OSError, r"from safetensors only, since a pickle such as pytorch_model.bin can run", tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if "decoder.layers.1.ffn" not in name}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(ValueError, r"checkpoint: it has no 'decoder.layers.1.ffn.linear_1.weight'", tmp_path)
    for missing in (tmp_path / "nowhere", str(tmp_path / "nowhere")):
        refuses(OSError, r"^path_or_id: expected a folder with a checkpoint, .*, got '.*/nowhere'$", missing)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    message = r"path_or_id: expected a checkpoint of model_type whereformer, .*, funnel.*; got 'gpt2'"
    refuses(ValueError, message, tmp_path)


def test_the_folder_of_a_run_names_the_folder_of_its_model(tmp_path):
    config = EncoderConfig(vocab_size=40, hidden_size=16, num_attention_heads=2, blocks="1")
    Encoder(config).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError) as error:
        load_pretrained(tmp_path)
    model = str(tmp_path / "model")
    assert str(error.value).endswith(f"config.json, got {str(tmp_path)!r}; did you mean {model!r}?")
    load_pretrained(model)
    (tmp_path / "empty").mkdir()
    refuses(InputError, r"config\.json, got .*/empty'$", tmp_path / "empty")
