"""Products of float32 on a GPU's tensor cores, emulated: they keep float32's error budget.

With the emulation, Triton's interpreter also runs all other tests of ``backend="triton"``.
"""

import numpy as np
import pytest
import torch

from tests.kernels import tensor_cores
from tests.kernels.cases import HEADS, check, content, need_triton, random
from tests.kernels.rounding import ROUNDINGS
from whereformer import OffsetBias
from whereformer.kernels.make_call import make_call
from whereformer.kernels.triton.blocks import choose_precision

UNIT = 2.0**-24


def relative_error(left, right, product):
    """The largest error of a product, in unit roundoffs of its size."""
    exact, size = (f(left.astype(float)) @ f(right.astype(float)) for f in (np.array, abs))
    return (abs(product - exact) / size).max() / UNIT


def one_by_one(left, right):
    """A product as float32 computes it without tensor cores, one multiply-add after the other."""
    total = np.zeros((len(left), right.shape[1]), np.float32)
    for k in range(left.shape[1]):
        total = (total + left[:, k : k + 1].astype(float) * right[k : k + 1]).astype(np.float32)
    return total


def normal(random):
    return random.standard_normal((64, 64)), random.standard_normal((64, 64))


def positive(random):
    return random.random((64, 64)), random.random((64, 64))


def equal(random):
    """All roundings go the same way."""
    return np.repeat(random.uniform(1, 2, (64, 1)), 64, 1), np.repeat(random.uniform(1, 2, (1, 64)), 64, 0)


def large_and_small(random):
    return (numbers * 10.0 ** random.integers(-12, 12, (64, 64)) for numbers in normal(random))


@pytest.mark.parametrize("draw", [normal, positive, equal, large_and_small])
def test_products_are_about_as_exact_as_those_of_float32(draw):
    errors = []
    for seed in range(10):
        left, right = (numbers.astype(np.float32) for numbers in draw(np.random.default_rng(seed)))
        errors.append([relative_error(left, right, f(left, right)) for f in (tensor_cores.dot, one_by_one)])
    ours, theirs = np.array(errors).max(0)
    assert ours < 3 * theirs
    if draw is normal:
        assert ours < ROUNDINGS


def test_a_single_product_of_tf32_would_be_hundreds_of_times_less_exact():
    left, right = (numbers.astype(np.float32) for numbers in normal(np.random.default_rng(0)))
    cut = (left.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    assert relative_error(left, right, cut.astype(float) @ right) > 100 * ROUNDINGS


def test_what_is_not_finite_stays_so():
    left, right = np.ones((16, 16), np.float32), np.full((16, 16), 0.1, np.float32)
    left[0, 3], left[1, 3], left[2, :2] = np.inf, np.nan, (np.inf, -np.inf)
    with np.errstate(invalid="ignore"):
        expected = left @ right
    np.testing.assert_allclose(tensor_cores.dot(left, right), expected, rtol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own tensor cores compute")
@pytest.mark.parametrize(
    ("n_q", "n_k", "size"),
    [
        (20, 33, 1e9),
        pytest.param(20, 33, 1e3, marks=pytest.mark.slow),
        pytest.param(2, 1024, 1.0, marks=pytest.mark.slow),
    ],
)
def test_attention_and_its_gradients(n_q, n_k, size, monkeypatch):
    need_triton()
    emulated, calls = tensor_cores.dot, []
    monkeypatch.setattr(tensor_cores, "dot", lambda *sides: calls.append(sides) or emulated(*sides))
    query, key, value = content(n_q, n_k, head_dim=64)
    # Values of one sign do not cancel, and neither do their errors.
    inputs = [3 * query, key, value.abs()]
    check("triton", inputs, [(OffsetBias, [random(HEADS, 9) * size], -4)])
    assert calls


@pytest.mark.parametrize(("width", "precision"), [(64, "tf32x3"), (80, "ieee")])
def test_wide_heads_do_not_use_tensor_cores(width, precision):
    assert choose_precision(make_call(*[torch.zeros(1, 1, 4, width)] * 3)) == precision
