"""Learned absolute positions equal those of BERT, ALBERT and tensor2tensor."""

import pytest
from torch.nn import functional

from tests.golden import check, check_gradients, groups
from tests.positions.layers import install
from whereformer import Positions, build_position

[BERT] = groups("positions/learned_bert", "")
_, T2T = groups("positions/learned_t2t", "beyond", "")


def learned(table):
    position = build_position("learned", hidden_size=table.shape[1], num_heads=1, max_length=len(table))
    return install(position, weight=table)


@pytest.mark.parametrize("case", BERT)
def test_embed_and_layer_norm_equal_bert(case):
    golden, n, width = case.tensors(), case.config["n"], case.config["d"]
    tolerance = 1e-5 if case.config["dtype"] == "float32" else 1e-9
    embedded = golden["x"]
    if case.config["token_types"]:
        embedded = embedded + golden["token_type_table"][golden["token_type"]]

    embedded = learned(golden["table"]).embed(embedded, Positions(0, 1, n))
    out = functional.layer_norm(embedded, (width,), golden["ln_gain"], golden["ln_bias"], eps=1e-12)

    check(out, golden["out"], tolerance)
    check_gradients(golden, out, tolerance)


@pytest.mark.parametrize("case", T2T)
def test_embed_equals_tensor2tensor_exactly(case):
    golden = case.tensors()
    positions = golden["positions"] if case.config["explicit_positions"] else Positions(0, 1, case.config["n"])

    out = learned(golden["table"]).embed(golden["x"], positions)

    check(out, golden["out"], 0.0)
    check_gradients(golden, out, 0.0)
