"""The plugin ``sandwich`` against the product of two sinusoidal vectors.

pytest examples/methods
"""

import pytest
import torch
from sandwich import Sandwich

from whereformer import Positions, Site, build_position
from whereformer.errors import InputError
from whereformer.positions import METHODS
from whereformer.positions.testing import check_position

METHODS.pop("sandwich")  # in the same process, other tests read the registry


def sinusoids(positions, width):
    """The position vectors of Vaswani et al. (2017): sines and cosines of each angle."""
    angles = [[p / 10_000 ** (2 * m / width) for m in range(width // 2)] for p in positions]
    angles = torch.tensor(angles, dtype=torch.float64)
    return torch.cat((angles.sin(), angles.cos()), -1)


@pytest.mark.parametrize(("heads", "width"), [(8, 128), (3, 10), (1, 2)])
def test_the_bias_is_the_product_of_position_vectors(heads, width):
    """At each pair of positions, the bias is the product of their two vectors, divided by the head's ratio."""
    position = build_position(Sandwich, hidden_size=4 * heads, num_heads=heads, width=width).double()
    queries, keys = Positions(4, 1, 5), Positions(0, 1, 9)
    (term,) = position.terms(torch.zeros(1, 5, 4 * heads, dtype=torch.float64), Site(queries, keys))
    products = sinusoids(queries.values().tolist(), width) @ sinusoids(keys.values().tolist(), width).T
    expected = torch.stack([products / (8 * head / heads) for head in range(1, heads + 1)])
    offsets = keys.values() - queries.values()[:, None]
    torch.testing.assert_close(term.table[:, offsets - term.first], expected, rtol=1e-12, atol=1e-12)


def test_it_keeps_the_laws_of_methods():
    """The laws hold, and a width that the formula does not allow is refused."""
    check_position(Sandwich)
    with pytest.raises(InputError, match="width: expected an even number of at least 2, got 7"):
        build_position(Sandwich, hidden_size=8, num_heads=1, width=7)
