"""Shaw's relative keys and values equal tensor2tensor's ``dot_product_attention_relative``."""

import pytest

from tests.golden import check, check_gradients, groups
from tests.positions.layers import check_causal, install, prepare
from whereformer import attention, attention_weights, build_position

RELATIVE, _ = groups("positions/shaw", "rel_", "layer_")
TOLERANCE = 1e-11


def shaw(config, keys, values):
    heads, head_dim = config["H"], config["d"]
    position = build_position("shaw", hidden_size=heads * head_dim, num_heads=heads, clip=config["clip"])
    # One layer: the original's tables (2 clip + 1, d) get our leading layer axis.
    return install(position, keys=keys.unsqueeze(0), values=values.unsqueeze(0))


def masks(case, golden):
    """The original adds -1e9 where we forbid."""
    if case.config["mask"] == "causal":
        check_causal(golden["mask_bias"][0, 0])
        return {"causal": True}
    return {"key_mask": golden["mask_bias"][:, 0, 0] == 0} if case.config["mask"] == "padding" else {}


@pytest.mark.parametrize("case", RELATIVE)
def test_attention_equals_the_original(case):
    golden = case.tensors()
    position = shaw(case.config, golden["rel_k"], golden["rel_v"])
    call = prepare(position, golden["q"], golden["k"], golden["v"])
    # The original's caller has already multiplied q by d ** -0.5.
    options = {"scale": 1.0, **masks(case, golden)}

    out = attention(*call, **options)
    check(out, golden["out"], TOLERANCE)
    check_gradients(golden, out, TOLERANCE)

    if "weights" in golden:  # not stored in the longest case
        weights = attention_weights(*call, **options)
        check(weights, golden["weights"], TOLERANCE)
        # Scores are known up to a constant per row.
        has_weight = weights > 0
        check(weights[has_weight].log(), golden["logits"].log_softmax(-1)[has_weight], TOLERANCE)
