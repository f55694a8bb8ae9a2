"""Windows grow in the same way for every method, and steps cost the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whereformer.data.masks import Batches, growing, window_lengths


def test_windows_of_64_tokens_have_8_16_and_32_first():
    assert window_lengths(64, 100) == [8] * 40 + [16] * 10 + [32] * 10 + [64] * 40


@pytest.mark.parametrize(
    ("length", "stages"), [(8, [8]), (16, [8, 16]), (32, [8, 16, 32]), (100, [8, 16, 32, 64, 100])]
)
def test_lengths_double_until_the_last(length, stages):
    assert list(dict.fromkeys(window_lengths(length, 1000))) == stages


@given(st.integers(8, 4096), st.integers(1, 300))
def test_windows_never_shrink_and_end_at_full_length(length, steps):
    lengths = window_lengths(length, steps)
    assert len(lengths) == steps
    assert lengths == sorted(lengths)
    assert max(lengths) <= length
    if steps > 1:
        assert lengths[-1] == length


def test_every_step_has_the_same_number_of_tokens_and_depends_on_the_seed_alone():
    stream = torch.arange(5, 400) % 60
    whole = Batches(stream, 4, 64, 0.3, 64, seed=3)
    found, again = ([growing(whole, 10)(step)["input_ids"] for step in range(10)] for _ in range(2))
    assert [ids.shape for ids in found] == [(32, 8)] * 4 + [(16, 16), (8, 32)] + [(4, 64)] * 4
    assert torch.equal(found[9], whole[9][0])
    assert all(map(torch.equal, found, again))
