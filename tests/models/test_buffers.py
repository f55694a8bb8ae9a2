"""Buffers of a position method, saved or not, are the same in files, copies and after other dtypes."""

import copy
import pickle
from functools import partial

import pytest
import torch
import transformers

import whereformer
from whereformer import Encoder, EncoderConfig, positions
from whereformer.positions import OffsetFunction

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}


class Buffered(OffsetFunction):
    """Adds ``-slope * |offset - center|``. The centers are a saved buffer, the slopes one that is not saved."""

    def __init__(self, model):
        super().__init__(model)
        self.register_buffer("center", torch.zeros(model.num_heads, 1))
        self.register_buffer("slope", 2.0 ** -torch.arange(model.num_heads)[:, None], persistent=False)

    def curve(self, offsets, *, layer=0):
        offsets = torch.as_tensor(offsets, device=self.slope.device)
        curves = -self.slope.float() * (offsets.flatten() - self.center.float()).abs()
        return curves.unflatten(1, offsets.shape)


def build(attached):
    if not attached:
        return Encoder(EncoderConfig(position="buffered", blocks="2", **SIZES)).eval()
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2, **SIZES), add_pooling_layer=False)
    return whereformer.attach(model.eval(), "buffered")


def save_and_load(model, attached, folder):
    model.save_pretrained(folder)
    load = partial(whereformer.load_attached, model_class=transformers.BertModel, add_pooling_layer=False)
    return (load if attached else Encoder.from_pretrained)(folder).eval()


def load_state(model, attached, _):
    fresh = build(attached)
    fresh.load_state_dict(model.state_dict())
    return fresh


COPIES = {
    "files": save_and_load,
    "load_state_dict": load_state,
    "deepcopy": lambda model, *_: copy.deepcopy(model),
    "pickle": lambda model, *_: pickle.loads(pickle.dumps(model)),
    "float64 and back": lambda model, *_: copy.deepcopy(model).double().float(),
    "bfloat16 and back": lambda model, *_: copy.deepcopy(model).bfloat16().float(),
}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_copies_have_the_buffers(name, attached, tmp_path, monkeypatch):
    monkeypatch.setitem(positions.METHODS, "buffered", Buffered)
    model = build(attached).bfloat16().float()  # all numbers are bfloat16's, so that no copy rounds them
    (method,) = (module for module in model.modules() if isinstance(module, Buffered))
    method.center.copy_(torch.tensor([[1.0], [-2.0]]))
    copied = COPIES[name](model, attached, tmp_path)
    ids = torch.arange(36).view(2, 18)
    assert torch.equal(copied(ids).last_hidden_state, model(ids).last_hidden_state)
