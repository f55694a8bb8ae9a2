"""Draw matrices as small PNG heatmaps for a page: block averages, a color palette and color bar ticks."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_hex
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ..sheet import plain

COLORS = 128
"""Colors in a picture. More would make it larger, and nobody could tell them apart."""
FINE = 80
"""From this number of pixels a side, browsers may smooth the picture, since sharp scaling would create patterns."""
OUTLIERS = 0.5
"""Percentage of pixels at each end of the scale that take the end's color, so that they do not stretch the scale."""

_BLUE_TO_ORANGE = ("#00294a", "#0072b2", "#7fbfe3", "#f7f7f7", "#f2b077", "#d55e00", "#5c2400")
PALETTES: dict[str, Colormap] = {
    "diverging": LinearSegmentedColormap.from_list("blue to orange", _BLUE_TO_ORANGE),
    "sequential": colormaps["cividis"],
}
"""One palette for values on both sides of a middle, one for small to large. Color-blind people can read both."""


@dataclass(frozen=True)
class Heatmap:
    """A drawn matrix, ready for the page's template.

    Args:
        image: the picture as a data URI.
        fine: whether it has so many pixels that single ones can't be seen.
        ticks: ticks of the color bar: percent from its left end, and text.
        axis: ticks of both rows and columns: percent from the top left, and text.
    """

    image: str
    fine: bool
    ticks: tuple[tuple[float, str], ...]
    axis: tuple[tuple[float, str], ...]

    @property
    def gradient(self) -> str:
        """The palette as a CSS gradient, from left to right."""
        colors = PALETTES["diverging"](np.linspace(0, 1, 9))
        return f"linear-gradient(to right, {', '.join(map(to_hex, colors))})"


def averaged(matrix: Tensor, pixels: int) -> NDArray[np.float64]:
    """Shrink a square matrix to at most ``pixels`` rows by averaging blocks; only the last blocks may be smaller."""
    block = -(-len(matrix) // pixels)
    grid = matrix.detach().double().cpu()[None, None]
    return np.asarray(avg_pool2d(grid, block, ceil_mode=True, count_include_pad=False)[0, 0].numpy())


def limits(values: NDArray[np.float64], center: float | None = None) -> tuple[float, float]:
    """Return the ends of a scale that leaves out a few outliers. With a center, both ends are equally far from it."""
    low, high = (float(end) for end in np.percentile(values, (OUTLIERS, 100 - OUTLIERS)))
    if center is not None:
        reach = max(high - center, center - low)
        low, high = center - reach, center + reach
    # All values are equal, up to rounding.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    return low, high


def heatmap(matrix: Tensor, *, pixels: int, center: float, first: int = 0) -> Heatmap:
    """Draw a square matrix with the diverging palette.

    Args:
        matrix: (n, n), finite.
        pixels: the most pixels that a side may have.
        center: the value in the middle of the palette.
        first: the position of row and column 0.
    """
    values = averaged(matrix, pixels)
    low, high = limits(values, center)
    shades = np.clip((values - low) / (high - low) * COLORS, 0, COLORS - 1).astype(np.uint8)
    end = first + len(matrix)
    ticks, marks = round_values(low, high), round_values(first, end - 1, integer=True)
    return Heatmap(
        image=_png(shades),
        fine=len(shades) >= FINE,
        ticks=tuple((_percent(tick, low, high), plain(tick)) for tick in ticks),
        axis=tuple((_percent(mark + 0.5, first, end), plain(mark)) for mark in marks),
    )


def round_values(low: float, high: float, *, integer: bool = False) -> list[float]:
    """Return about four round values between two ends, to mark at an axis."""
    ticks: Any = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=integer).tick_values(low, high)
    return [float(tick) for tick in ticks if low <= tick <= high]


def _percent(value: float, low: float, high: float) -> float:
    return round(100 * (value - low) / (high - low), 1)


def _png(shades: NDArray[np.uint8]) -> str:
    image = Image.frombytes("P", shades.shape[::-1], shades.tobytes())
    colors = PALETTES["diverging"](np.linspace(0, 1, COLORS), bytes=True)[:, :3]
    image.putpalette(np.ascontiguousarray(colors).tobytes())
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
