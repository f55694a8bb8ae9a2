"""Tests of the run with poisoned memory (see tests/poison.py); other runs skip them."""

import os

import pytest
import torch

from whereformer.kernels.cpu.workspace import Workspace

from ..poison import is_poisoned

pytestmark = pytest.mark.skipif(os.environ.get("WHEREFORMER_TEST_POISON") != "1", reason="memory is not poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_memory_is_poisoned_when_it_is_taken_and_when_it_is_given_back(dtype):
    workspace = Workspace(torch.device("cpu"))
    with workspace.scope():
        taken = workspace.take((2, 3), dtype)
        assert is_poisoned(taken)
        taken.zero_()
    assert is_poisoned(taken)
    assert not workspace.zeros((2, 3), dtype).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fresh_tensors_are_poisoned(dtype):
    like = torch.zeros(2, 3, dtype=dtype)
    for fresh in (torch.empty(2, dtype=dtype), torch.empty_like(like), like.new_empty(4)):
        assert is_poisoned(fresh)
