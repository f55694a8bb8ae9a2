"""Products of float32 on a GPU's tensor cores, emulated: they keep float32's error budget.

With the emulation, Triton's interpreter also runs all other tests of ``backend="triton"``.
"""

import numpy as np
import pytest
import torch

from tests.kernels import tensor_cores
from tests.kernels.cases import HEADS, check, content, need_triton, random
from whereformer import OffsetBias
from whereformer.kernels.make_call import make_call
from whereformer.kernels.triton.blocks import choose_precision


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
