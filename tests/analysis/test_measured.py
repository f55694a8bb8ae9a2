"""Attention by offset, measured."""

import pytest
import torch

from tests.golden import check
from whereformer.analysis.measured import OffsetStatistics
from whereformer.analysis.toeplitz import from_diagonals


def statistics(weights):
    """Of weights (batch, heads, n, n) of one layer, in two parts."""
    found = OffsetStatistics(1, weights.shape[1], weights.shape[-1])
    for part in weights.split(2):
        found.add(0, part)
    return found


def slowly(weights):
    """The share of the variance of log weights by a regression on indicators of offsets and rows."""
    batch, n = len(weights), weights.shape[-1]
    logs = weights.log()
    index = torch.arange(n)
    offset = (index[None] - index[:, None] + n - 1).expand(batch, n, n).flatten()
    row = (torch.arange(batch * n).view(batch, n, 1)).expand(batch, n, n).flatten()
    columns = [torch.nn.functional.one_hot(part).double() for part in (row, offset)]
    rest = []
    for design in (columns[0], torch.cat(columns, 1)):
        solution = torch.linalg.lstsq(design, logs.flatten().unsqueeze(-1), driver="gelsd").solution
        rest.append(float((logs.flatten() - (design @ solution).squeeze(-1)).square().sum()))
    return 1 - rest[1] / rest[0]


@pytest.mark.parametrize("n", [2, 3, 7])
def test_explained_is_that_of_a_regression(n):
    scores = torch.randn(3, 2, n, n, dtype=torch.float64) + from_diagonals(torch.randn(2 * n - 1).double())
    weights = scores.softmax(-1)
    found = statistics(weights).explained()
    expected = [[slowly(weights[:, head]) for head in range(2)]]
    check(found, torch.tensor(expected, dtype=torch.float64), 1e-9)


@pytest.mark.parametrize("curve", [torch.arange(-9.0, 10), torch.randn(19), -torch.arange(-9.0, 10).abs()])
def test_a_head_that_sees_distance_only_is_explained(curve):
    weights = from_diagonals(curve).softmax(-1).expand(2, 1, 10, 10)
    assert float(statistics(weights).explained()) == pytest.approx(1, abs=1e-6)
    part = weights[..., 1:-1, 1:-1]  # without the first and the last token
    assert float(statistics(part).explained()) == pytest.approx(1, abs=1e-6)


def test_content_is_not_explained():
    scores = torch.randn(200, 1, 6, 1, 6).expand(-1, -1, -1, 6, -1)[:, :, 0]  # keys matter, queries don't
    assert float(statistics(scores.softmax(-1)).explained()) < 0.02


def test_shares_are_mean_weights():
    weights = torch.randn(5, 3, 6, 6).softmax(-1)
    shares = statistics(weights).shares(2)
    expected = torch.stack([weights.diagonal(offset, -2, -1).mean((0, -1)) for offset in range(-2, 3)], -1)
    check(shares, expected.double()[None], 1e-6)


def test_equal_weights_and_single_tokens():
    for n in (1, 4):
        weights = torch.full((2, 1, n, n), 1 / n)
        assert float(statistics(weights).explained()) == 1


def test_no_weight_at_all_is_no_infinity():
    weights = torch.eye(5).expand(2, 1, 5, 5)
    assert float(statistics(weights).explained()) == pytest.approx(1, abs=1e-6)


def test_layers_without_weights_are_nan():
    found = OffsetStatistics(2, 1, 3)
    found.add(1, torch.full((1, 1, 3, 3), 1 / 3))
    assert found.explained()[0].isnan().all()
    assert found.shares(1)[0].isnan().all()
    assert found.shares(1)[1].isfinite().all()
