"""How far TISA's table has to go: no further than its kernels add anything, and exact to rounding."""

from __future__ import annotations

import pytest
import torch

from whereformer import Positions, Site, build_position

SIZES = {"hidden_size": 12, "num_heads": 3, "num_layers": 2}


def table(position, length, layer=0):
    hidden = torch.zeros(1, length, SIZES["hidden_size"])
    site = position.with_shared(Site.self_attention(Positions(0, 1, length), layer=layer))
    (term,) = position.terms(hidden, site)
    return term


def read(term, offsets):
    """The numbers of a table, (heads, len(offsets))."""
    return term.table[:, (offsets - term.first).clamp(0, term.table.shape[1] - 1)]


def test_a_fresh_table_does_not_grow_with_the_sequence():
    position = build_position("tisa", **SIZES)
    assert table(position, 5000).table.shape[1] < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_left_out_is_below_rounding(dtype):
    position = build_position("tisa", **SIZES).to(dtype)
    with torch.no_grad():
        position.center[1, 2, 0] = -70.0
        position.amplitude[1, 2, 0] = 9.0
    length = 600
    for layer in range(2):
        term = table(position, length, layer)
        offsets = torch.arange(1 - length, length)
        error = (read(term, offsets) - position.curve(offsets, layer=layer)).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps
    assert table(position, length, 1).table.shape[1] > table(position, length, 0).table.shape[1]


@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf")])
def test_a_kernel_that_never_settles_has_the_whole_table(broken):
    position = build_position("tisa", **SIZES)
    with torch.no_grad():
        position.sharpness[0, 0, 0] = 0.0
        position.amplitude[0, 1, 0] = broken
    length = 300
    assert table(position, length).table.shape[1] == 2 * length - 1


@pytest.mark.parametrize("amplitude", [0.0, 1e-8, 1e-5, 1.0])
def test_gradients_are_those_of_the_whole_table(amplitude):
    length = 100
    gradients = []
    for cut in (False, True):
        torch.manual_seed(0)
        position = build_position("tisa", **SIZES).double()
        with torch.no_grad():
            position.amplitude.fill_(amplitude)
        offsets = torch.arange(1 - length, length)
        values = read(table(position, length), offsets) if cut else position.curve(offsets)
        gradients.append(torch.autograd.grad((values * offsets.cos()).sum(), list(position.parameters())))
    torch.testing.assert_close(*gradients)
