"""Curves as paths, matrices as pictures."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from whereformer.lab.report import panels
from whereformer.lab.report.heatmaps import averaged, heatmap, limits
from whereformer.lab.report.panels import Range


def points_of(path):
    """Absolute points of a path of one line."""
    start, rest = re.fullmatch(r"M(-?\d+ -?\d+)(?:l(.*)|h0)", path).groups()
    steps = np.array([int(number) for number in re.findall(r"-?\d+", rest or "")]).reshape(-1, 2)
    return np.cumsum(np.vstack([[int(number) for number in start.split()], steps]), axis=0)


@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=101).filter(lambda values: len(values) % 2))
def test_a_path_passes_every_point(values):
    reach = len(values) // 2
    curve = panels.draw(range(-reach, reach + 1), values, Range.of(values), label="")
    points = points_of(curve.line)
    unit = Range.of(values).span / panels.DOWN
    offsets, sampled = np.arange(-reach, reach + 1), np.array(values)
    if reach <= panels.SMALL:
        drawn = np.interp(panels.ACROSS * offsets, points[:, 0], points[:, 1])
        assert np.abs(drawn + sampled / unit).max() <= 0.5 + 1e-6  # whole numbers


def test_far_offsets_are_means_of_bins_and_near_ones_are_exact():
    offsets = np.arange(-511, 512)
    across = panels._sampled(offsets.astype(float), offsets.astype(float))
    assert len(across) <= 2 * panels.SMALL + 1 + 2 * panels.BINS
    near = across[np.abs(across) <= panels.SMALL]
    assert near.tolist() == list(range(-panels.SMALL, panels.SMALL + 1))
    assert np.allclose(across, -across[::-1])
    assert panels._sampled(offsets.astype(float), np.ones(1023)).tolist() == [1.0] * len(across)


@pytest.mark.parametrize("values", [[0.0], [3.0], [0.0] * 3, [1e-30] * 3, [1e6, -1e6, 1e6]])
def test_flat_and_extreme_curves_have_finite_views(values):
    reach = len(values) // 2
    curve = panels.draw(range(-reach, reach + 1), values, Range.of(values, [5.0]), label="", spread=values)
    for plot in (curve.small, *curve.large):
        left, top, width, height = map(float, plot.view.split())
        assert np.isfinite([left, top]).all()
        assert width > 0
        assert height > 0
        assert all(0 <= at <= 100 for at, _ in (*plot.across, *plot.up))


@given(n=st.integers(1, 40), pixels=st.integers(1, 40))
def test_averaging_keeps_constants_and_bounds(n, pixels):
    matrix = torch.arange(n * n, dtype=torch.float64).reshape(n, n)
    small = averaged(matrix, pixels)
    assert max(small.shape) <= pixels
    assert small.min() >= 0
    assert small.max() <= n * n - 1
    assert np.allclose(averaged(torch.full((n, n), 7.0), pixels), 7.0)


def test_blocks_at_the_end_are_averaged_over_what_they_have():
    matrix = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert averaged(matrix, 2).tolist() == [[3.0, 4.5], [7.5, 9.0]]


def pixels_of(found):
    image = Image.open(io.BytesIO(base64.b64decode(found.image.split(",")[1])))
    return np.asarray(image.convert("RGB")).astype(int)


def test_the_center_is_white_and_the_sides_have_their_colors():
    found = heatmap(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), pixels=8, center=1.0)
    (low, middle), (high, _) = pixels_of(found)
    assert low[2] > low[0]  # blue
    assert high[0] > high[2]  # orange
    assert middle.min() > 230
    assert [text for _, text in found.ticks] == ["0.5", "1", "1.5"]


def test_equal_values_have_a_scale_around_them():
    assert limits(np.full((2, 2), 3.0)) == (2.5, 3.5)
    assert limits(np.full((2, 2), 3.0), center=3.0) == (2.5, 3.5)
    assert heatmap(torch.zeros(1, 1), pixels=4, center=0.0).ticks


def test_ticks_lie_at_their_pixels():
    found = heatmap(torch.eye(4), pixels=4, center=0.5, first=10)
    assert {text: at for at, text in found.axis} == {"10": 12.5, "11": 37.5, "12": 62.5, "13": 87.5}
