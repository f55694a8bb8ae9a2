"""What a position method shares is made once a forward, where the model is."""

import pytest
import torch

from tests.models.funnels import funnel_config
from whereformer import Encoder, Positions, build_position
from whereformer.positions.alibi import Alibi
from whereformer.positions.floater import Floater
from whereformer.positions.rope import Rope
from whereformer.positions.t5 import T5
from whereformer.positions.tisa import Tisa
from whereformer.positions.tupe import Tupe

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
        ("tisa", "2", torch.Tensor, "tolist", 1),  # waits for its kernels
        *((position, "0", Tisa, "prepare", 1) for position in ("tisa", "tisa+rope")),  # looks at them
        ("rope", "2", Rope, "_turns", 3),  # the whole sequence, and each pooled one
        ("floater", "2", Floater, "trajectory", 1),  # follows its equation
        ("tupe", "2", Tupe, "prepare", 1),  # projects its table
        ("t5", "2", T5, "_columns", 5),  # among three sequences, and from each pooled one to the one before
        ("alibi", "2", Alibi, "curve", 5),  # draws it as often
    ],
)
def test_a_funnel_makes_what_is_shared_once(position, decoder, owner, name, times, monkeypatch):
    model = Encoder(funnel_config(position=position, blocks="2-2-2", decoder_layers=decoder))
    calls = count(monkeypatch, owner, name)
    model(torch.ones(2, 17, dtype=torch.long))
    assert len(calls) == times


def test_t5s_buckets_are_copied_once(monkeypatch):
    model = Encoder(funnel_config(position="t5", blocks="1-1-1", position_options={"reset_cls": True}))
    calls = count(monkeypatch, torch, "tensor")
    model(torch.ones(2, 17, dtype=torch.long))
    assert sum(len(args[0]) > 100 for args in calls if isinstance(args[0], tuple)) == 1


@pytest.mark.parametrize("name", ["rope", "alibi", "t5"])
def test_what_is_shared_is_where_the_model_is(name):
    position = build_position(name, **SIZES)
    assert not [key for key in position.state_dict() if key != "weight"]
    position, at = position.to("meta"), Positions(0, 1, 5)
    shared = position.prepare_for(at, at)
    found = {"rope": lambda: shared[0][10_000.0, 0][0], "alibi": lambda: shared[0].table, "t5": lambda: shared.columns}[
        name
    ]()
    assert found.device.type == "meta"
