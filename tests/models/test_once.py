"""What a position method shares is made once a forward, where the model is; and models export for any length."""

import pytest
import torch
from torch.export import Dim, export

from tests.models.funnels import funnel_config
from tests.models.test_encoder import small_config
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
    ("position", "owner", "name", "times"),
    [
        ("tisa", torch.Tensor, "tolist", 1),  # waits for its kernels
        ("rope", Rope, "_turns", 3),  # the whole sequence, and each pooled one
        ("floater", Floater, "trajectory", 1),  # follows its equation
        ("tupe", Tupe, "prepare", 1),  # projects its table
        ("t5", T5, "_columns", 5),  # among three sequences, and from each pooled one to the one before
    ],
)
def test_a_funnel_with_a_decoder_makes_what_is_shared_once(position, owner, name, times, monkeypatch):
    model = Encoder(funnel_config(position=position, blocks="2-2-2", decoder_layers="2"))
    calls = count(monkeypatch, owner, name)
    model(torch.ones(2, 17, dtype=torch.long))
    assert len(calls) == times


@pytest.mark.parametrize("position", ["tisa", "tisa+rope"])
def test_a_funnel_looks_at_tisas_kernels_once(position, monkeypatch):
    model = Encoder(funnel_config(position=position, blocks="1-1-1"))
    calls = count(monkeypatch, Tisa, "prepare")
    model(torch.ones(2, 17, dtype=torch.long))
    assert len(calls) == 1


def test_t5s_buckets_are_copied_once(monkeypatch):
    model = Encoder(funnel_config(position="t5", blocks="1-1-1", position_options={"reset_cls": True}))
    calls = count(monkeypatch, torch, "tensor")
    model(torch.ones(2, 17, dtype=torch.long))
    assert sum(len(args[0]) > 100 for args in calls if isinstance(args[0], tuple)) == 1


def test_alibis_curve_is_drawn_once(monkeypatch):
    model = Encoder(small_config(position="alibi"))
    calls = count(monkeypatch, Alibi, "curve")
    model(torch.ones(2, 17, dtype=torch.long))
    assert len(calls) == 1


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


@pytest.mark.parametrize(
    "position",
    ["t5", "rope", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tisa", "shaw", "transformer_xl"))],
)
def test_exports_for_any_length(position):
    model = Encoder(small_config(position=position)).eval()
    shapes = {"input_ids": {1: Dim("n", min=2, max=300)}}
    program = export(model, (torch.ones(2, 24, dtype=torch.long),), dynamic_shapes=shapes, strict=False).module()
    for length in (2, 30, 120):
        ids = torch.randint(1, 20, (2, length))
        torch.testing.assert_close(program(ids).last_hidden_state, model(ids).last_hidden_state)
