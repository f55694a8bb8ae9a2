"""The example ``enformer`` against its authors' formulas, written out anew in numpy and with their relative shift."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tests.positions.example_methods import example_method
from tests.positions.stack import HEADS, LAYERS, WIDTH, spread
from whereformer import Positions, Site, attention, build_position
from whereformer.errors import InputError
from whereformer.testing import check_position

enformer = example_method("enformer")

HEAD_DIM = WIDTH // HEADS


def basis(length, count):
    """The features of all distances from 1 - length to length - 1, with scipy's gamma distribution."""
    distances = np.arange(1 - length, length)
    away = np.abs(distances)[:, None]
    half_lives = 2.0 ** np.linspace(3.0, math.log2(length), count)
    mean, deviation = np.linspace(length / count, length, count), length / (2 * count)
    density = stats.gamma.pdf(away, a=(mean / deviation) ** 2, scale=deviation**2 / mean) + 1e-8
    families = (
        np.exp(-math.log(2) / half_lives * away),
        (2.0 ** np.arange(1, count + 1) - 1 > away).astype(float),
        density / density.max(0),
    )
    found = np.concatenate(families, -1)
    return torch.from_numpy(np.concatenate((found, np.sign(distances)[:, None] * found), -1))


@pytest.mark.parametrize(("length", "count"), [(1536, 32), (64, 5), (9, 2), (2, 1), (1, 1)])
def test_features(length, count):
    found = enformer.features(torch.arange(1 - length, length), count, length)
    torch.testing.assert_close(found, basis(length, count), rtol=1e-9, atol=1e-12)


def shifted(scores):
    """Transformer-XL's relative shift: (..., n, 2 n - 1) by distance to (..., n, n) by key."""
    n = scores.shape[-2]
    rows = [scores[..., i, n - 1 - i : 2 * n - 1 - i] for i in range(n)]
    return torch.stack(rows, -2)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_attention_is_that_of_the_authors(n):
    position = build_position(
        enformer.Enformer, hidden_size=WIDTH, num_heads=HEADS, num_layers=LAYERS, num_features=12, length=n
    ).double()
    spread(position)
    query, key, value = torch.randn(3, 2, HEADS, n, HEAD_DIM, dtype=torch.float64)
    at, layer, scale = Positions(0, 1, n), 1, HEAD_DIM**-0.5
    # Theirs are added to the query after the scale.
    content, relative = (
        bias.detach()[layer][:, None] * scale for bias in (position.content_bias, position.position_bias)
    )
    vectors = (basis(n, 2) @ position.kernel.detach()[layer]).unflatten(-1, (HEADS, -1)).transpose(0, 1)
    scores = (query * scale + content) @ key.mT + shifted((query * scale + relative) @ vectors.mT)
    site = Site(at, at, layer)
    terms = position.terms(torch.zeros(2, n, WIDTH, dtype=torch.float64), site)
    out = attention(*position.rotate(query, key, value, site), terms)
    torch.testing.assert_close(out, scores.softmax(-1) @ value, rtol=1e-10, atol=1e-10)


def test_far_offsets_look_alike():
    position = build_position(enformer.Enformer, hidden_size=WIDTH, num_heads=HEADS, length=4)
    terms = position.terms(torch.zeros(1, 1, WIDTH), Site(Positions(0, 1, 1), Positions(0, 1, 100)))
    assert [term.table.shape[1] for term in terms] == [4, 4]
    assert terms[0].first == 0


def test_sizes_by_default():
    for head_dim, expected in ((64, 60), (8, 6), (4, 6)):
        position = build_position(enformer.Enformer, hidden_size=2 * head_dim, num_heads=2, max_length=100)
        assert (position.num_features, position.length) == (expected, 100)
    for options, message in (
        ({"num_features": 8}, "num_features: expected a multiple of 6, got 8"),
        ({"length": 0}, "length: expected at least 1, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            build_position(enformer.Enformer, hidden_size=16, num_heads=2, **options)


@pytest.mark.parametrize("options", [{}, {"length": 4, "num_features": 12}, {"causal": True}])
def test_it_keeps_the_laws_of_methods(options):
    check_position(enformer.Enformer, **options)
