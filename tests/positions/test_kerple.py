"""KERPLE against the paper's formulas, with gradients in float64."""

import math

import pytest
import torch

from tests.positions.stack import HEADS, LAYERS, build
from whereformer import build_position

LAYER = 2


def formula(variant, r1, r2, distance):
    """The numbers that are added to the scores of each head."""
    r1, r2 = r1.abs(), r2.abs()
    if variant == "log":
        return -r1 * torch.log(1 + r2 * distance)
    return -r1 * distance**r2 if distance else 0 * r1


@pytest.mark.parametrize("variant", ["log", "power"])
@pytest.mark.parametrize("step", [1, 0.75])
def test_the_curve_and_its_gradients_are_those_of_the_paper(variant, step):
    position = build("kerple", variant=variant)
    offsets = [step * index for index in range(-9, 30)]
    curve = position.curve(offsets, layer=LAYER)
    r1, r2 = position.r1[LAYER], position.r2[LAYER]
    expected = torch.stack([formula(variant, r1, r2, abs(offset)) for offset in offsets], 1)
    torch.testing.assert_close(curve, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(curve)
    parameters = position.r1, position.r2
    gradients = [torch.autograd.grad((values * direction).sum(), parameters) for values in (curve, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("variant", "bounds"), [("log", (2, 1)), ("power", (1, 2))])
def test_initial_values_are_the_authors(variant, bounds):
    position = build_position("kerple", hidden_size=4000, num_heads=1000, num_layers=2, variant=variant)
    for parameter, bound in zip((position.r1, position.r2), bounds, strict=True):
        assert parameter.shape == (2, 1000)
        assert 0 <= parameter.min() < 0.02 * bound
        assert 0.98 * bound < parameter.max() <= bound
        assert parameter.mean().item() == pytest.approx(bound / 2, rel=0.1)


def test_a_power_beyond_two_counts_as_two_and_can_come_back():
    position = build("kerple", variant="power")
    position.r2.data.fill_(-3.0)
    curve = position.curve([0, 1, 5])
    torch.testing.assert_close(curve, -position.r1[0].abs()[:, None] * torch.tensor([0.0, 1, 25]).double())
    (gradient,) = torch.autograd.grad(curve.sum(), position.r2)
    # The derivative of -r1 * 5 ** r2 at 2, on the other side of zero
    expected = position.r1[0].detach().abs() * 25 * math.log(5)
    torch.testing.assert_close(gradient[0], expected)
    assert gradient.shape == (LAYERS, HEADS)
