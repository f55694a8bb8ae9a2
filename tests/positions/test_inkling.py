"""``inkling`` against the attention of transformers' Inkling, and against its formula in both directions."""

from functools import partial

import pytest
import torch
from transformers import InklingTextConfig
from transformers.models.inkling import modeling_inkling as theirs

from tests.positions import stack
from tests.positions.stack import HEADS, WIDTH
from whereformer import OffsetKeys, Positions, Site, attention_weights
from whereformer.kernels.terms import position_values

HEAD_DIM = WIDTH // HEADS
LAYER = 1


build = partial(stack.build, "inkling")


@pytest.mark.parametrize(("kind", "floor"), [("hybrid", None), ("hybrid", 4), ("hybrid_sliding", 4)])
def test_weights_are_those_of_transformers(kind, floor, monkeypatch):
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    config = InklingTextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        layer_types=[kind],
        d_rel=3,
        rel_extent=6,
        sliding_window_size=5,
        log_scaling_n_floor=floor,
        log_scaling_alpha=0.3,
        attn_implementation="eager",
        **sizes,
        **{f"swa_{name}": value for name, value in sizes.items()},
    )
    module = theirs.InklingAttention(config, 0).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, -1, 1)
    sliding, n = kind == "hybrid_sliding", 13
    x = torch.randn(2, n, WIDTH, dtype=torch.float64)
    positions = torch.arange(n)
    distance = positions[:, None] - positions
    allowed = (distance >= 0) & (distance < (5 if sliding else n))
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    # They compute the softmax and the factor in float32.
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    expected = module(x, mask)[1]
    monkeypatch.undo()

    position = build(rank=3, extent=5 if sliding else 6, causal=True, log_scaling=None if sliding else floor, alpha=0.3)
    with torch.no_grad():
        position.mix[LAYER] = module.r_proj.weight
        position.profiles[LAYER] = module.rel_logits_proj.proj
    query, key = (
        norm(features.unflatten(-1, (HEADS, -1))).transpose(1, 2)
        for norm, features in (
            (module.q_norm, module.q_proj(x)),
            (module.k_norm, module.k_sconv(module.k_proj(x), None, None)),
        )
    )
    site = Site.self_attention(Positions(0, 1, n), layer=LAYER)
    terms = position.terms(x, site)
    assert [type(term) for term in terms] == [OffsetKeys]
    query, key, value = position.transform_qkv(query, key, key, site)
    window = (4, 0) if sliding else None
    actual = attention_weights(query, key, value, terms, causal=True, scale=1 / HEAD_DIM, window=window)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)  # their norms are in float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sides",
    [
        (Positions(0, 1, 9), Positions(0, 1, 9)),
        (Positions(30, 1, 2), Positions(0, 2, 8)),
        (torch.tensor([[3, 7], [0, 40]]), torch.tensor([5, 2, 11, 0])),
    ],
    ids=["square", "far", "explicit"],
)
def test_the_formula(sides, causal):
    position, extent = build(rank=2, extent=4, causal=causal), 4
    queries, keys = (torch.atleast_2d(position_values(positions)) for positions in sides)
    hidden = torch.randn(2, queries.shape[-1], WIDTH, dtype=torch.float64)
    position.requires_grad_(False)
    (term,) = position.terms(hidden, Site(*sides, LAYER))
    mix = position.mix.detach()[LAYER].unflatten(0, (HEADS, 2))
    profiles = position.profiles.detach()[LAYER]
    shape = (2, HEADS, queries.shape[-1], keys.shape[-1])
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        distance = int(queries[b % len(queries), i] - keys[b % len(keys), j])
        expected = 0.0
        if (0 if causal else 1 - extent) <= distance < extent:
            column = profiles[:, distance if causal else distance + extent - 1]
            expected = float(mix[h] @ hidden[b, i] @ column)
        read = term.table[0, max(0, min(term.table.shape[1] - 1, -distance - term.first))]
        assert float(term.query_factors[b, h, i] @ read) == pytest.approx(expected, abs=1e-12)
