"""Attention dropout: decided by torch's seed, unbiased, independent, and consistent with its gradient."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from whereformer import OffsetValues, attention, attention_weights
from whereformer.kernels.dropout import keep_mask, row_seeds


def content(n_q=4, n_k=6):
    return tuple(torch.randn(2, 3, length, 4, dtype=torch.float64) for length in (n_q, n_k, n_k))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_probability_zero_drops_nothing_and_draws_nothing(backend):
    inputs = content()
    plain = attention(*inputs, backend=backend)
    state = torch.get_rng_state()
    assert torch.equal(attention(*inputs, dropout_p=0.0, backend=backend), plain)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_weights_are_returned_before_dropout(backend):
    inputs = content()
    weights = attention_weights(*inputs, dropout_p=0.4)
    torch.testing.assert_close(weights @ inputs[2], attention(*inputs, backend=backend))


def test_expectation_is_the_output_without_dropout():
    inputs = content()
    terms = [OffsetValues(torch.randn(1, 3, 4, dtype=torch.float64), -1)]
    draws = torch.stack([attention(*inputs, terms, dropout_p=0.3, backend="reference") for _ in range(500)])
    error = draws.mean(0) - attention(*inputs, terms, backend="reference")
    assert (error.abs() < 5 * draws.std(0) / math.sqrt(len(draws))).all()


def test_mask_is_the_documented_function_of_seed_and_indices():
    """splitmix64 of seed and row, then murmur3's finaliser of key and column, in Python's unbounded integers."""

    def splitmix64(state):
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    def murmur3(value):
        value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
        value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
        return value ^ value >> 16

    for seed in (0, 1, 123456789123456789, 2**62 - 1):
        keys = row_seeds(torch.tensor(seed), 2, 3, 5)
        expected = [splitmix64((seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64) % 2**32 for index in range(30)]
        assert keys.flatten().tolist() == expected
        columns = torch.tensor([0, 1, 2, 100, 65_535])
        for dropout_p in (0.1, 0.5):
            survivors = [
                [murmur3((key + column * 0x9E3779B9) % 2**32) >= int(dropout_p * 2**32) for column in columns.tolist()]
                for key in expected
            ]
            assert keep_mask(keys, columns, dropout_p).flatten(0, 2).tolist() == survivors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_what_it_dropped(dtype, use_reentrant):
    """A reentrant checkpoint computes without gradients first, and with them again: by the same backend."""
    inputs = content()
    run = partial(attention, dropout_p=0.4)
    results = []
    for call in (run, partial(checkpoint, run, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = call(*leaves)
        out.sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)
