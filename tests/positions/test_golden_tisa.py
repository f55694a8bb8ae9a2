"""TISA's kernels equal the authors' released module, in the paper's convention and in the module's own."""

import pytest
import torch

from tests.golden import check, check_gradients, groups
from tests.positions.layers import install, prepare, scores
from whereformer import Positions, Site, attention, attention_weights, build_position
from whereformer.positions.tisa import from_released

BIAS, ATTENTION, _ = groups("positions/tisa", "bias_", "attn_", "rect_")
CONVENTIONS = ("paper", "shipped")
TOLERANCE = 1e-11


def tisa(case, golden, convention="paper"):
    """The module stores (kernels, heads), ours (layers, heads, kernels); it has f(i - j - 1), the paper f(j - i)."""
    parameters = tuple(golden[name] for name in ("amplitudes", "sharpness", "offsets"))
    converted = from_released(*parameters) if convention == "shipped" else (kernels.mT for kernels in parameters)
    amplitude, sharpness, center = (kernels.unsqueeze(0) for kernels in converted)
    heads, head_dim = case.config["H"], case.config.get("d", 1)
    sizes = {"hidden_size": heads * head_dim, "num_heads": heads}
    position = build_position("tisa", **sizes, num_kernels=case.config["S"])
    return install(position, amplitude=amplitude, sharpness=sharpness, center=center)


def terms_of(position, n_q, n_k):
    hidden = torch.zeros(1, n_q, position.model.hidden_size)
    return position.terms(hidden, Site(Positions(n_k - n_q, 1, n_q), Positions(0, 1, n_k)))


@pytest.mark.parametrize("case", BIAS)
def test_curve_equals_the_positional_scores(case):
    golden, n = case.tensors(), case.config["n"]
    check(tisa(case, golden).curve(torch.arange(1 - n, n)), golden["scores"], TOLERANCE)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("case", [case for case in BIAS if "bias_paper" in case.values[0].stored])
def test_bias_equals_the_original(case, convention):
    """All cases except the two longest, which store only the curve."""
    gradient = f"grad_{{}}_{convention}"
    golden, n = case.tensors(gradient), case.config["n"]

    bias = scores(terms_of(tisa(case, golden, convention), n, n), n, n)

    check(bias, golden[f"bias_{convention}"], TOLERANCE)
    check_gradients(golden, bias, TOLERANCE, gradient=gradient)


def test_derivatives_of_all_layers_curves():
    position = build_position("tisa", hidden_size=4, num_heads=2, num_layers=2, num_kernels=3).double()
    offsets = torch.arange(-6, 7)

    def curves(*kernels):
        return torch.stack(position._curves(offsets, *kernels).unbind())

    kernels = [torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(curves, kernels)
    assert torch.autograd.gradgradcheck(curves, kernels)
    for layer, curve in enumerate(position.curve_per_layer(offsets)):
        assert torch.equal(curve, position.curve(offsets, layer=layer))


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_equals_the_original(case):
    golden = case.tensors()
    options = {"causal": case.config["causal"], "key_mask": golden.get("key_mask")}
    qkv = tuple(golden[name] for name in "qkv")
    call = prepare(tisa(case, golden), *qkv)

    out = attention(*call, **options)
    check(out, golden["out_paper"], TOLERANCE)
    check_gradients(golden, out, TOLERANCE)
    if "weights_paper" in golden:  # not stored in the longest case
        check(attention_weights(*call, **options), golden["weights_paper"], TOLERANCE)

    shipped = attention(*prepare(tisa(case, golden, "shipped"), *qkv), **options)
    check(shipped, golden["out_shipped"], TOLERANCE)
