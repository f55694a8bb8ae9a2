"""The example ``sandwich`` against the product of two sinusoidal vectors, as the paper builds it."""

import pytest
import torch

from tests.positions.example_methods import example_method
from whereformer import OffsetBias, Positions, Site, build_position
from whereformer.errors import InputError
from whereformer.testing import check_position

Sandwich = example_method("sandwich").Sandwich


def sinusoids(positions, width):
    """The position vectors of Vaswani et al. (2017): sines and cosines of each angle."""
    angles = [[p / 10_000 ** (2 * m / width) for m in range(width // 2)] for p in positions]
    angles = torch.tensor(angles, dtype=torch.float64)
    return torch.cat((angles.sin(), angles.cos()), -1)


@pytest.mark.parametrize(("heads", "width"), [(8, 128), (3, 10), (1, 2)])
def test_the_bias_is_the_product_of_position_vectors(heads, width):
    position = build_position(Sandwich, hidden_size=4 * heads, num_heads=heads, width=width).double()
    queries, keys = Positions(4, 1, 5), Positions(0, 1, 9)
    (term,) = position.terms(torch.zeros(1, 5, 4 * heads, dtype=torch.float64), Site(queries, keys))
    assert isinstance(term, OffsetBias)
    products = sinusoids(queries.values().tolist(), width) @ sinusoids(keys.values().tolist(), width).T
    expected = torch.stack([products / (8 * head / heads) for head in range(1, heads + 1)])
    offsets = keys.values() - queries.values()[:, None]
    torch.testing.assert_close(term.table[:, offsets - term.first], expected, rtol=1e-12, atol=1e-12)


def test_all_layers_share_one_term():
    position = build_position(Sandwich, hidden_size=8, num_heads=2, num_layers=3)
    at = Positions(0, 1, 6)
    shared = position.prepare_for(Site(at, at))
    terms = [position.terms(torch.zeros(1, 6, 8), Site(at, at, layer, shared)) for layer in range(3)]
    assert terms[0] is terms[1] is terms[2]
    assert not list(position.parameters())


def test_far_offsets_are_exact():
    position = build_position(Sandwich, hidden_size=8, num_heads=1)
    far = position.curve([2**24 + 1])
    expected = sum(torch.tensor((2**24 + 1) * 10_000.0 ** (-2 * m / 128), dtype=torch.float64).cos() for m in range(64))
    torch.testing.assert_close(far.double().squeeze(), expected / 8, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_it_keeps_the_laws_of_methods(options):
    check_position(Sandwich, **options)
    with pytest.raises(InputError, match="width: expected an even number of at least 2, got 7"):
        build_position(Sandwich, hidden_size=8, num_heads=1, width=7)
