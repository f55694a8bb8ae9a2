"""What a position method shares is made once a forward, where the model is."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from tests.models.funnels import funnel_config
from whereformer import Encoder, EncoderConfig, Positions, Site, attach, build_position
from whereformer.positions.alibi import Alibi
from whereformer.positions.floater import Floater
from whereformer.positions.rope import Rope
from whereformer.positions.t5 import T5
from whereformer.positions.tisa import Tisa

SIZES = {"hidden_size": 12, "num_heads": 3, "num_layers": 2}


def count(monkeypatch, owner, name):
    """The calls of a function from now on."""
    calls, function = [], getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize(
    ("position", "decoder", "owner", "name", "times"),
    [
        # among three sequences, and from each pooled one to the one before
        *((position, "2", Tisa, "reach_per_layer", 5) for position in ("tisa", "tisa+rope")),
        ("tisa", "2", Tisa, "curve_per_layer", 5),
        ("rope", "2", Rope, "_rotations", 7),
        ("floater", "2", Floater, "trajectory", 5),
        ("t5", "2", T5, "curve", 5),
        ("alibi", "2", Alibi, "curve", 5),
    ],
)
def test_a_funnel_makes_what_is_shared_once(position, decoder, owner, name, times, monkeypatch):
    model = Encoder(funnel_config(position=position, blocks="2-2-2", decoder_layers=decoder))
    calls = count(monkeypatch, owner, name)
    model(torch.ones(2, 17, dtype=torch.long))
    assert len(calls) == times


@pytest.mark.parametrize("name", ["rope", "alibi", "t5"])
def test_what_is_shared_is_where_the_model_is(name):
    position = build_position(name, **SIZES)
    assert not [key for key in position.state_dict() if key != "weight"]
    position, positions = position.to("meta"), Positions(0, 1, 5)
    shared = position.compute_shared(Site(positions, positions))
    table = shared[0][10_000.0][0] if name == "rope" else shared[1][0].table
    assert table.device.type == "meta"


class Operations(TorchDispatchMode):
    """Counts the operations that run in it."""

    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.number += 1
        return function(*arguments, **(options or {}))


def encoder_with(position):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 48}
    return Encoder(EncoderConfig(vocab_size=10, position=position, blocks="12", type_vocab_size=0, **sizes))


def bert_with(position):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 12}
    return attach(BertModel(BertConfig(vocab_size=10, **sizes), add_pooling_layer=False), position)


def operations_of_a_step(model):
    with Operations() as counted:
        model.train()(torch.ones(2, 48, dtype=torch.long)).last_hidden_state.sum().backward()
    return counted.number


@pytest.mark.parametrize("build", [encoder_with, bert_with])
def test_the_tables_of_all_layers_are_made_at_once(build):
    plain = operations_of_a_step(build("none"))
    for name in ("tisa", "t5", "shaw", "alibi", "kerple"):
        assert 0 < operations_of_a_step(build(name)) - plain <= 40, name


def test_rope_makes_its_cosines_once():
    """Three operations turn a query or a key, and five turn its gradient."""
    added = operations_of_a_step(encoder_with("rope")) - operations_of_a_step(encoder_with("none"))
    assert added <= 12 * 2 * (3 + 5) + 20
