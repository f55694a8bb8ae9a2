"""Halving a sequence and making it whole again, and scores of token types, by their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.funnels import MODES, funnel_config, pool, segment_scores, windows
from whereformer import EncoderConfig, Positions, Site
from whereformer.models.layers import SegmentScores
from whereformer.models.pooling import unpool

WAYS = [
    {"separate_cls": True, "truncate_seq": True},
    {"separate_cls": True, "truncate_seq": False},
    {"separate_cls": False, "truncate_seq": True},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=["truncated", "whole", "without_cls"])


@every_way
@pytest.mark.parametrize("mode", ["mean", "max", "min"])
@pytest.mark.parametrize("mask", ["any", "all"])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 9, 16])
def test_everything_is_pooled_by_the_same_windows(way, mode, mask, length):
    config = funnel_config(pooling=mode, mask_pooling=mask, **way)
    groups, pooling = windows(length, config), config.make_pooling()
    assert pooling.applies_to(length) == (groups is not None)
    if groups is None:
        assert pooling.pooled_length(length) == length
        return
    assert pooling.pooled_length(length) == len(groups)
    hidden, real, types = torch.randn(2, length, 3), torch.rand(2, length) < 0.5, torch.randint(0, 3, (2, length))
    torch.testing.assert_close(pooling.pool_hidden(hidden), pool(hidden, groups, MODES[mode]))
    positions = torch.rand(2, length).cumsum(1)
    pooled = pooling.pool_site(Site(positions, positions, key_mask=real, key_segments=types))
    assert pooled.query_positions is pooled.key_positions
    assert torch.equal(pooled.key_positions, pool(positions, groups, MODES["first"]))
    assert torch.equal(pooled.key_mask, pool(real, groups, MODES[mask]))
    assert pooled.query_segments is pooled.key_segments
    assert torch.equal(pooled.key_segments, pool(types, groups, MODES["first"]))
    # One row of positions for the whole batch stays one.
    assert torch.equal(pooling.pool_site(Site(positions[0], positions[0])).key_positions, pooled.key_positions[0])


@every_way
@given(length=st.integers(1, 60), times=st.integers(1, 5))
def test_affine_positions_are_those_of_the_first_tokens_but_for_cls(way, length, times):
    config = funnel_config(**way)
    pooling = config.make_pooling()
    affine, explicit = Positions(0, 1, length), torch.arange(length)
    for _ in range(times):
        if not pooling.applies_to(affine.length):
            break
        affine, explicit = (pooling.pool_site(Site(ids, ids)).key_positions for ids in (affine, explicit))
    first = 1 if config.separate_cls else 0
    values = affine.values()
    assert torch.equal(values[first:], explicit[first:])
    # [CLS] is as far from the next token as tokens are from each other; where positions are given it stays.
    assert values[0] == (1 - affine.stride if config.separate_cls else 0)
    assert explicit[0] == 0


@every_way
@given(length=st.integers(1, 40), times=st.integers(1, 4))
def test_unpooling_gives_every_token_its_own_window(way, length, times):
    """A token's number survives maximum pooling nowhere but in its window, whose largest it then is."""
    config = funnel_config(pooling="max", **way)
    pooling, first = config.make_pooling(), int(config.separate_cls)
    numbers = torch.arange(length, dtype=torch.float64).view(1, -1, 1)
    hidden, poolings = numbers, 0
    while poolings < times and pooling.applies_to(hidden.shape[1]):
        hidden, poolings = pooling.pool_hidden(hidden), poolings + 1
    unpooled = unpool(hidden, 2**times, length, config.separate_cls)
    assert unpooled.shape == numbers.shape
    if poolings < times:
        return  # Where halving came to an end each state stands for more tokens than it was made of.
    size = 2**times
    covered = first + size * (hidden.shape[1] - first)
    for token in range(length):
        if token < first:
            assert unpooled[0, token] == token
        elif token >= covered:
            assert unpooled[0, token] == 0
            assert config.truncate_seq
            assert length - token < size
        else:
            window = (token - first) // size
            start = first + window * size
            assert start <= unpooled[0, token] < start + size


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("kinds", [1, 2, 3, 5])
def test_scores_of_types_are_their_definition(separate, kinds):
    """Type 2 equals every type."""
    module = SegmentScores(funnel_config(separate_cls=separate, type_vocab_size=kinds)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    query = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    query_types, key_types = torch.randint(0, max(kinds, 3), (2, 5)), torch.randint(0, max(kinds, 3), (2, 7))
    site = Site(Positions(0, 1, 5), Positions(0, 1, 7), query_segments=query_types, key_segments=key_types)
    term = module(query, site)
    scores = term.query_factors @ term.key_factors.mT
    expected = segment_scores(module, query, query_types, key_types)
    torch.testing.assert_close(scores, expected)
    assert (scores[:, :, 0] == 0).all() == separate
    assert (scores[..., 0] == 0).all() == separate


def test_examples_of_lengths():
    def lengths(n, **options):
        return EncoderConfig(blocks="1-1-1", **options).block_lengths(n)

    assert lengths(512) == (512, 256, 128)
    assert lengths(13) == lengths(13, truncate_seq=False) == lengths(13, separate_cls=False) == (13, 7, 4)
    assert lengths(16) == lengths(16, separate_cls=False) == (16, 8, 4)
    assert lengths(16, truncate_seq=False) == (16, 9, 5)
    assert EncoderConfig(blocks="12").block_lengths(7) == (7,)
    with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
        lengths(0)
