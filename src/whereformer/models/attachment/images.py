"""The grid of an image model's tokens, from its configuration."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import InputError
from ...positions import Position, describe, method_names
from ...positions.rope2d import Rope2d


def grid_options(config: Any, n: int, name: str) -> dict[str, int]:
    """Return the sides of the grid and the tokens before it, as options of the methods that take them.

    Args:
        config: the configuration of a model of transformers.
        n: the tokens that its attention sees.
        name: a position method, or several joined by "+".

    Returns:
        ``rows``, ``columns`` and ``prefix``; nothing for other models and for methods without such options.
    """
    sides = [_both(getattr(config, field, None)) for field in ("image_size", "patch_size")]
    takes_grids = any("columns" in describe(part)[1] for part in method_names(name))
    if not takes_grids or sides[0] is None or sides[1] is None:
        return {}
    rows, columns = (size // patch for size, patch in zip(*sides, strict=True))
    prefix = n - rows * columns
    if prefix < 0:
        raise InputError(
            "position",
            f"{name!r} needs all patches of an image in one sequence; this model has {rows} x {columns} patches and "
            f"sequences of {n} tokens",
        )
    return {"rows": rows, "columns": columns, "prefix": prefix}


def check_grid(position: Position, n: int) -> None:
    """Raise an InputError if a method's grid is not that of the n tokens of an image model."""
    for part in position.methods():
        if isinstance(part, Rope2d) and part.length != n:
            raise InputError(
                "rows",
                f"expected a prefix and rows x columns of {n} tokens, got {part.prefix} and {part.rows} x "
                f"{part.columns}, which are {part.length}",
            )


class CheckImage:
    """A hook that runs before a model and refuses images of another size than the model's.

    Models that stretch their own positions to another size take them, but the method's grid would have other rows.
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
