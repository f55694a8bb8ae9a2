"""The grid of an image model's tokens, from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...positions import Position


def grid_of(config: Any, n: int, position: Position) -> Tensor | None:
    """Return the row and the column of each token of an image model, (1, n, 2), for a method that takes two axes.

    Tokens before the patches, such as [CLS], have the first patch's.

    Args:
        config: the configuration of a model of transformers.
        n: the tokens that its attention sees.
        position: its method.

    Returns:
        None for other models and for methods whose positions have one axis.
    """
    image, patch = (_both(getattr(config, field, None)) for field in ("image_size", "patch_size"))
    if image is None or patch is None or all(method.axes != 2 for method in position.methods()):
        return None
    rows, columns = image[0] // patch[0], image[1] // patch[1]
    after = getattr(config, "num_detection_tokens", 0)  # YOLOS has more tokens behind the patches
    if n < rows * columns + after:
        raise InputError(
            "position",
            f"rope with sections needs all patches of an image in one sequence; this model has {rows} x {columns} "
            f"patches and sequences of {n} tokens",
        )
    cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    before = cells.new_zeros(n - len(cells) - after, 2)
    grid = torch.cat((before, cells, cells.new_zeros(after, 2)))[None]
    position.check_axes("position", grid)
    return grid


class CheckImage:
    """A hook that runs before a model and refuses images of another size than the model's.

    Models that stretch their own positions to another size take them, but the method's grid has the rows of this one.
    """

    def __init__(self, config: Any) -> None:
        self.size = _both(config.image_size)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pixels = kwargs.get("pixel_values", args[0] if args else None)
        if isinstance(pixels, Tensor) and pixels.dim() == 4 and tuple(pixels.shape[2:]) != self.size:
            height, width = self.size or (0, 0)
            raise InputError(
                "pixel_values",
                f"expected images of {height} x {width}, which the attached method has the grid of, "
                f"got {pixels.shape[2]} x {pixels.shape[3]}",
            )


def _both(size: Any) -> tuple[int, int] | None:
    """Return a size as height and width; None if it is none."""
    if isinstance(size, int) and size > 0:
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) and side > 0 for side in size):
        return size[0], size[1]
    return None
