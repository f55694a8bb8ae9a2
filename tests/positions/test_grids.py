"""Methods over grids: their formulas, where tokens are, and what is refused."""

import pytest
import torch

from tests.positions.stack import HEADS, LAYERS, build
from whereformer import DenseBias, OffsetBias2d, Place, PositionRangeError, Positions, build_position
from whereformer.errors import InputError
from whereformer.kernels.grids import written_out
from whereformer.testing import check_position

METHODS = ("tisa2d", "grid_bias")
SIDES = {"rows": 3, "columns": 4}


def scores(position, queries, keys=None, layer=1):
    """What a method adds to each pair of two sequences, (heads, n_q, n_k), and the kind of its term."""
    # The method does not look at hidden states.
    (term,) = position.terms(torch.zeros(0), Place(queries, queries if keys is None else keys, layer))
    found = written_out(term) if isinstance(term, OffsetBias2d) else term.scores[0]
    return found, type(term)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_every_pair_gets_the_number_of_its_offsets(method, prefix):
    position = build(method, **SIDES, prefix=prefix)
    n = 12 + prefix
    found, kind = scores(position, Positions(0, 1, n))
    assert kind is OffsetBias2d
    surface = position.surface(layer=1)
    assert surface.shape == (HEADS, 5, 7)
    for query in range(n):
        for key in range(n):
            i, j = query - prefix, key - prefix
            if i < 0 or j < 0:
                expected = position.prefix_bias[1, :, 2 if i < 0 and j < 0 else 0 if i < 0 else 1]
            else:
                expected = surface[:, j // 4 - i // 4 + 2, j % 4 - i % 4 + 3]
            assert torch.equal(found[:, query, key], expected)


def test_the_formula_of_tisa2d():
    position = build("tisa2d", **SIDES, num_kernels=3)
    surface = position.surface(layer=2)
    for head, row, column in ((0, 0, 0), (1, -2, 3), (0, 1, -3)):
        kernels = [position.amplitude[2, head], position.sharpness[2, head], *position.center[2, head].T]
        expected = sum(
            amplitude * torch.exp(-abs(sharpness) * ((row - u) ** 2 + (column - v) ** 2))
            for amplitude, sharpness, u, v in zip(*kernels, strict=True)
        )
        torch.testing.assert_close(surface[head, row + 2, column + 3], expected)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_the_form_of_the_term_does_not_matter(method, prefix):
    """Whole rows of the image are a table, all other choices of tokens are pairs, with the same numbers."""
    position = build(method, **SIDES, prefix=prefix)
    n = 12 + prefix
    whole, _ = scores(position, Positions(0, 1, n))
    choices = [
        (Positions(0, 1, 8 + prefix), OffsetBias2d),
        (Positions(0, 1, 9 + prefix), DenseBias),
        (Positions(1, 2, 5), DenseBias),
        (torch.tensor([3, 0, 11, 3]), DenseBias),
    ]
    for queries, kind in choices:
        for keys, other in choices:
            found, term = scores(position, queries, keys)
            at = [each.values() if isinstance(each, Positions) else each for each in (queries, keys)]
            torch.testing.assert_close(found, whole[:, at[0]][:, :, at[1]])
            assert term is (OffsetBias2d if kind is other is OffsetBias2d else DenseBias)


@pytest.mark.parametrize("method", METHODS)
def test_moving_an_image_by_rows_changes_nothing(method):
    position = build(method, rows=6, columns=4)
    first, later = (scores(position, Positions(start, 1, 8))[0] for start in (0, 12))
    torch.testing.assert_close(first, later)
    moved_by_columns = scores(position, Positions(2, 1, 8))[0]
    assert not torch.allclose(first, moved_by_columns)


@pytest.mark.parametrize("method", METHODS)
def test_layers_share_or_have_their_own(method):
    own, shared = build(method, **SIDES), build(method, **SIDES, share_layers=True)
    assert not torch.equal(own.surface(layer=0), own.surface(layer=1))
    assert torch.equal(shared.surface(layer=0), shared.surface(layer=1))
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (own, shared)]
    assert sizes[0] == LAYERS * sizes[1]


@pytest.mark.parametrize(
    ("length", "options", "sides"),
    [
        (16, {}, (4, 4, 0)),
        (24, {}, (5, 5, 0)),
        (197, {"prefix": 1}, (14, 14, 1)),
        (24, {"columns": 6}, (4, 6, 0)),
        (24, {"rows": 3}, (3, 8, 0)),
        (24, {"rows": 3, "columns": 3, "prefix": 5}, (3, 3, 5)),
    ],
)
def test_the_sides_by_default(length, options, sides):
    position = build_position("tisa2d", hidden_size=16, num_heads=2, max_length=length, **options)
    assert (position.rows, position.columns, position.prefix) == sides


@pytest.mark.parametrize("method", METHODS)
def test_positions_beyond_the_grid_are_refused(method):
    position = build(method, **SIDES, prefix=1)
    for at in (Positions(0, 1, 14), torch.tensor([3, 13])):
        with pytest.raises(
            PositionRangeError, match=rf"^{method} covers positions 0 to 12 .* 13\), got position 13; raise"
        ):
            scores(position, at)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows: expected at least 1, got 0"),
        ({"columns": -4}, "columns: expected at least 1, got -4"),
        ({"prefix": -1}, "prefix: expected at least 0, got -1"),
        ({"columns": 2.5}, "columns: expected a whole number, got 2.5"),
        ({"rows": 2**20, "columns": 2**20}, "rows: expected at most 2147483647 cells, got 1048576 x 1048576"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_options_that_make_no_grid_are_refused(method, options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        build_position(method, hidden_size=16, num_heads=2, **options)


def test_kernels_may_have_a_learning_rate_of_their_own():
    position = build("tisa2d", **SIDES, prefix=1)
    assert [parameter.shape[2:] for parameter in position.kernel_parameters()] == [(5,), (5,), (5, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_they_compile_as_one_graph(method):
    check_position(method, prefix=2, columns=4, compiles=True)
