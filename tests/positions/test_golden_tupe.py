"""TUPE-A and TUPE-R equal the authors' fork of fairseq: one attention, with gradients, and the whole encoder."""

import pytest

from tests.golden import check, check_gradients, groups
from tests.positions.layers import feed_forward, install, linear, merge_heads, norm, prepare, split_heads
from whereformer import attention, build_position

_, MODELS = groups("positions/tupe", "bucket_", ("A_", "R_"))
TOLERANCE = 1e-11


def tupe(golden, config):
    parameters = {
        "table": golden["pos_weight"],
        "norm__weight": golden["pos_ln_weight"],
        "norm__bias": golden["pos_ln_bias"],
        "query__weight": golden["pos_q_weight"],
        "query__bias": golden["pos_q_bias"],
        "key__weight": golden["pos_k_weight"],
        "key__bias": golden["pos_k_bias"],
    }
    sizes = {
        "hidden_size": config["C"],
        "num_heads": config["H"],
        "num_layers": config["layers"],
        "max_length": config["max_seq_len"],
    }
    if config["variant"] == "TUPE-A":
        return install(build_position("tupe", **sizes), **parameters)
    position = build_position(
        "tupe+t5", num_buckets=config["rel_pos_bins"], max_distance=config["max_rel_pos"], **sizes
    )
    parameters = {f"parts__0__{name}": tensor for name, tensor in parameters.items()}
    # Theirs is (buckets + 1, heads).
    return install(position, **parameters, parts__1__weight=golden["rel_weight"].mT)


def self_attention(position, hidden, weights, prefix, config, **options):
    """Their projections are one matrix with the rows of query, key and value; scores divide by sqrt(2 d)."""
    projected = hidden @ weights[f"{prefix}in_proj_weight"].mT + weights[f"{prefix}in_proj_bias"]
    query, key, value = (split_heads(part, config["H"]) for part in projected.chunk(3, -1))
    return merge_heads(attention(*prepare(position, query, key, value, hidden=hidden), **options))


@pytest.mark.parametrize("case", MODELS)
def test_attention_equals_the_original(case):
    golden, config = case.tensors("ga_{}"), case.config
    position = tupe(golden, config)
    allowed = {"key_mask": ~golden["key_padding"]} if config["padding"] else {}

    # Theirs is time first.
    attended = self_attention(position, golden["x"].transpose(0, 1), golden, "", config, **allowed)
    out = (attended @ golden["out_proj_weight"].mT + golden["out_proj_bias"]).transpose(0, 1)

    check(out, golden["attn_out"], TOLERANCE)
    check_gradients(golden, out, TOLERANCE, gradient="ga_{}", cotangent="cot_attn")


@pytest.mark.parametrize("case", [case for case in MODELS if "final" in case.values[0].stored])
def test_encoder_equals_the_original(case):
    golden, config = case.tensors(), case.config
    weights = {name.removeprefix("sd:"): tensor for name, tensor in golden.items() if name.startswith("sd:")}
    position = tupe(golden, config)

    hidden = norm(weights["embed_tokens.weight"][golden["tokens"]], weights, "emb_layer_norm")
    # `x` is what the first layer sees, time first.
    check(hidden, golden["x"].transpose(0, 1), TOLERANCE)
    for layer in range(config["layers"]):
        name = f"layers.{layer}"
        attended = self_attention(position, hidden, weights, f"{name}.self_attn.", config)
        attended = linear(attended, weights, f"{name}.self_attn.out_proj")
        hidden = norm(hidden + attended, weights, f"{name}.self_attn_layer_norm")
        hidden = feed_forward(hidden, weights, name)

    check(hidden, golden["final"], TOLERANCE)
