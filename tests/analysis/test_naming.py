"""Names of heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.test_fit import offsets_of
from whereformer.analysis.naming import BLIND, RULES, name_heads
from whereformer.analysis.toeplitz import from_diagonals


def names(curve):
    return name_heads(from_diagonals(torch.atleast_2d(curve)))


CURVES = {
    "previous token": lambda k: 5.0 * (k == -1),
    "next token": lambda k: 1.5 * (k == 1),
    "same token": lambda k: 3.0 * (k == 0),
    "local window": lambda k: 2 * torch.exp(-0.05 * k**2),
    "global": lambda k: 1.0 * (k.abs() > 12),
    "position-blind": lambda k: 0.2 * (k == -1),
}


@pytest.mark.parametrize("n", [32, 100, 400])
@pytest.mark.parametrize("name", CURVES)
def test_curves_have_their_names(name, n):
    assert names(CURVES[name](offsets_of(n)).double()) == [name]


def test_every_name_has_its_rule():
    assert {*CURVES, "mixed"} == set(RULES)
    assert all(rule for rule in RULES.values())


def test_one_side_is_local_too():
    k = offsets_of(128)
    assert names(torch.where(k < 0, 2 * torch.exp(-0.02 * k**2), 0.0)) == ["local window"]


def test_two_neighbors_are_a_window_and_no_token():
    k = offsets_of(64)
    assert names(4.0 * (k.abs() == 1)) == ["local window"]


def test_places_rather_than_distances_are_mixed():
    scores = 3 * torch.randn(1, 1, 64).expand(1, 64, 64)  # some keys draw everyone
    assert name_heads(scores) == ["mixed"]


def test_rows_may_have_constants():
    curve = CURVES["local window"](offsets_of(50))
    scores = from_diagonals(curve[None]) + 10 * torch.randn(1, 50, 1)
    assert name_heads(scores) == ["local window"]


@given(st.floats(-50, 50), st.floats(0, 0.99))
def test_blind_is_what_hardly_differs(constant, part):
    curve = constant + part * BLIND * torch.rand(63, generator=torch.Generator().manual_seed(0))
    assert names(curve.double()) == ["position-blind"]


def test_few_positions():
    assert names(torch.zeros(1)) == ["position-blind"]
    assert names(torch.tensor([4.0, 0.0, 0.0]))[0] == "previous token"
    assert names(torch.zeros(3)) == ["position-blind"]


def test_huge_scores():
    assert names(1e4 * (offsets_of(40) == -1).double()) == ["previous token"]
