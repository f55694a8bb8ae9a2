"""Tests of the run with poisoned memory (see tests/poison.py); other runs skip them."""

import os

import pytest
import torch

from whereformer.kernels import native

from ..poison import is_poisoned

pytestmark = pytest.mark.skipif(os.environ.get("WHEREFORMER_TEST_POISON") != "1", reason="memory is not poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fresh_tensors_are_poisoned(dtype):
    like = torch.zeros(2, 3, dtype=dtype)
    for fresh in (torch.empty(2, dtype=dtype), torch.empty_like(like), like.new_empty(4)):
        assert is_poisoned(fresh)


def test_the_kernels_scratch_is_poisoned():
    assert native.poisons
