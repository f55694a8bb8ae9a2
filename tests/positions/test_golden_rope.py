"""Rotary embeddings equal RoFormer's (by bert4keras), GPT-J's and GPT-NeoX's."""

import pytest
import torch

from tests.golden import check, check_gradients, groups
from tests.positions.layers import check_causal, merge_heads, prepare, split_heads
from whereformer import Positions, Site, attention, attention_weights, build_position

ROFORMER_ROTATIONS, ROFORMER_LAYERS = groups("positions/rope_roformer", "rot_", "attn_")
[GPTJ] = groups("positions/rope_gptj", "")
[NEOX] = groups("positions/rope_neox", "")


def rope(config, **options):
    heads, head_dim = config["H"], config["d"]
    return build_position(
        "rope", hidden_size=heads * head_dim, num_heads=heads, head_dim=head_dim, base=config["base"], **options
    ).double()


@pytest.mark.parametrize("case", ROFORMER_ROTATIONS)
def test_interleaved_rotation_equals_roformer(case):
    golden = case.tensors()
    positions = golden["positions"]
    # Their layout is (batch, n, heads, d).
    query, key = golden["q"].transpose(1, 2), golden["k"].transpose(1, 2)

    query, key, _ = rope(case.config, layout="interleaved").transform_qkv(query, key, key, Site(positions, positions))

    check(query.transpose(1, 2), golden["q_rot"], 1e-11)
    check(key.transpose(1, 2), golden["k_rot"], 1e-11)


@pytest.mark.parametrize("case", ROFORMER_LAYERS)
def test_layer_equals_roformer(case):
    golden, heads = case.tensors(), case.config["H"]
    query, key, value = (split_heads(golden["x"] @ golden[f"W{name}"] + golden[f"b{name}"], heads) for name in "qkv")
    call = prepare(rope(case.config, layout="interleaved"), query, key, value)

    out = merge_heads(attention(*call, key_mask=golden.get("mask"))) @ golden["Wo"] + golden["bo"]
    check(out, golden["out"], 1e-11)
    check_gradients(golden, out, 1e-11)

    # Scores are stored before the mask, and known up to a constant per row.
    check(attention_weights(*call).log(), golden["scores"].log_softmax(-1), 1e-11)


@pytest.mark.parametrize("case", GPTJ)
def test_attention_equals_gptj(case):
    golden, config = case.tensors(), case.config
    # Their layout is (n, heads, d), without a batch.
    query, key, value = (golden[name].transpose(0, 1).unsqueeze(0) for name in "qkv")
    call = prepare(rope(config, layout="interleaved", rotary_dim=config["rotary_dims"]), query, key, value)
    rotated = tuple(features.squeeze(0).transpose(0, 1) for features in call[:2])

    for features, name in zip(rotated, "qk", strict=True):
        check(features[..., : config["rotary_dims"]], golden[f"{name}_rot"], 1e-12)
        # Only the rotated part is stored; the rest passes through.
        assert torch.equal(features[..., config["rotary_dims"] :], golden[name][..., config["rotary_dims"] :])

    if config["causal"]:
        check_causal(golden["mask_bias"])  # they add -1e10
    out = attention(*call, causal=config["causal"]).squeeze(0).transpose(0, 1)
    check(out, golden["out"], 1e-12)
    check_gradients(golden, out, 1e-12)


@pytest.mark.parametrize("case", NEOX)
def test_attention_equals_gpt_neox(case):
    """1e-5, because the original computes its angles in float32."""
    golden, config = case.tensors(), case.config
    # Their layout is (n, batch, heads, d).
    query, key, value = (golden[name].permute(1, 2, 0, 3) for name in "qkv")
    positions = Positions(config["first_position"], 1, config["n"])
    position = rope(config, layout="half", rotary_dim=config["rotary_dim"])

    turns, _ = position.compute_shared(Site(positions, positions))
    cos, sin, *_ = turns[config["base"]]
    check(cos, golden["cos"], 1e-5)
    check(sin.abs(), golden["sin"].abs(), 1e-5)

    call = prepare(position, query, key, value, positions=(positions, positions))
    check(call[0].permute(2, 0, 1, 3), golden["q_rot"], 1e-5)
    check(call[1].permute(2, 0, 1, 3), golden["k_rot"], 1e-5)

    out = attention(*call, causal=config["causal"])
    check(out, golden["out"], 1e-5)
    check_gradients(golden, out, 1e-5)


def test_a_base_per_layer_is_repeated_over_the_layers_in_turn():
    options = {"hidden_size": 8, "num_heads": 1, "num_layers": 5}
    of_layers = build_position("rope", base=[160_000, 10.0], **options)
    query = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    for layer, base in enumerate((160_000, 10.0, 160_000, 10.0, 160_000)):
        site = Site.self_attention(Positions(0, 1, 6), layer=layer)
        expected = build_position("rope", base=base, **options).transform_qkv(query, query, query, site)
        torch.testing.assert_close(of_layers.transform_qkv(query, query, query, site), expected, rtol=0, atol=0)


@pytest.mark.parametrize("base", [[], "10", [1.0, "x"], [1.0, -1.0], [True], {}])
def test_other_bases_are_refused(base):
    with pytest.raises(ValueError, match=r"^base: expected .* got [^\n]*$"):
        build_position("rope", hidden_size=8, num_heads=1, num_layers=5, base=base)
