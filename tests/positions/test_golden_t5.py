"""T5's bucketed biases equal Mesh TensorFlow's, and those of transformers in float64."""

import pytest
import torch

from tests.golden import check, check_gradients, groups
from tests.positions.layers import install, merge_heads, prepare, scores, split_heads
from whereformer import attention, build_position

MESH_BUCKETS, MESH_LAYERS = groups("positions/t5_mesh", "bucket_", ("enc_", "dec_"))
[HF] = groups("positions/t5_hf", "")


def t5(config, weight):
    names = ("num_buckets", "max_distance")
    position = build_position(
        "t5",
        hidden_size=config["C"],
        num_heads=config["H"],
        head_dim=config["d_kv"],
        causal=config["causal"],
        **{name: config[name] for name in names},
    )
    return install(position, weight=weight)


@pytest.mark.parametrize("case", MESH_BUCKETS)
def test_buckets_equal_the_original(case):
    golden, buckets = case.tensors(), case.config["num_buckets"]
    config = {**case.config, "C": 1, "H": 1, "d_kv": 1, "causal": not case.config["bidirectional"]}
    # A table that holds its own column number makes the curve the bucket it read.
    position = t5(config, torch.arange(buckets).double().unsqueeze(0))

    assert torch.equal(position.curve(golden["relative_position"])[0].long(), golden["bucket"])


@pytest.mark.parametrize("case", MESH_LAYERS)
def test_layer_equals_mesh_tensorflow(case):
    golden, heads = case.tensors(), case.config["H"]
    query, key, value = (split_heads(golden["x"] @ golden[name], heads) for name in ("Wq", "Wk", "Wv"))
    call = prepare(t5(case.config, golden["rel_bias"]), query, key, value)
    documents = golden.get("sequence_id")

    # No 1 / sqrt(d): the original folds it into the initial query weights.
    attended = attention(
        *call, scale=1.0, causal=case.config["causal"], query_documents=documents, key_documents=documents
    )
    out = merge_heads(attended) @ golden["Wo"]

    check(out, golden["out"], 2e-5)
    check_gradients(golden, out, 5e-5)


@pytest.mark.parametrize("case", HF)
def test_layer_equals_transformers(case):
    golden, config = case.tensors(), case.config
    # Their table is (buckets, heads); while decoding, queries are the tail of the sequence that keys see in full.
    position = t5(config, golden["table"].mT)
    key_source = golden.get("memory", golden["x"])
    query, key, value = (
        split_heads(source @ golden[name].mT, config["H"])
        for source, name in ((golden["x"], "Wq"), (key_source, "Wk"), (key_source, "Wv"))
    )
    call = prepare(position, query, key, value)

    # No 1 / sqrt(d) either.
    out = attention(*call, scale=1.0, causal=config["causal"], key_mask=golden.get("key_mask"))
    out = merge_heads(out) @ golden["Wo"].mT

    check(scores(call[3], config["nq"], config["nk"]), golden["bias"], 1e-12)
    check(out, golden["out"], 1e-12)
    check_gradients(golden, out, 1e-12)
