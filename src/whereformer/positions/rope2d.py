"""RoPE over two dimensions: rotations by the row and by the column of a cell, for images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.terms import PositionsLike
from .base import MOST_POSITIONS, ModelShape, Position, table_rows
from .rope import LAYOUTS, Turn, rotated, turn_by
from .site import Site

FREQUENCIES = ("axial", "alternate")


class Rope2d(Position):
    """Rotates features of query and key by angles proportional to the row and to the column; for images.

    The first half of the pairs turns with the row and the other half with the column, so that query . key depends on
    the offset in rows and in columns alone. Of each half, pair m turns by ``place * base ** (-4 m / head_dim)``. Tokens
    of the prefix, such as [CLS], do not turn. The default is DINOv3; Pixtral has ``base=10000, frequencies="alternate",
    normalize=False``, and EVA-02 ``base=10000, layout="interleaved", normalize=False``.

    Position p is cell ``p - prefix`` of the grid, row by row.

    Args:
        rows: the rows of the grid. They have to be given; :func:`~whereformer.attach` takes them from the model.
        columns: the columns of the grid, likewise.
        prefix: the tokens before the grid, such as [CLS].
        base: sets the longest wavelength.
        frequencies: "axial", the same ones for rows and columns; "alternate", where columns have those between the
            ones of the rows, ``base ** (-(4 m + 2) / head_dim)``.
        normalize: measure the cells' centers from -1 to 1 over the grid, times 2 pi, so that a larger grid has nearer
            cells; otherwise a place is the number of the row or column, from 0.
        layout: the features that form pair m, as for rope: "half" or "interleaved".
    Extrapolation: nothing is trained, so the layers fit any grid; a model's grid is fixed when it is built.
    Source: Siméoni et al. (2025), arXiv 2508.10104 (DINOv3), and its code; Agrawal et al. (2024), arXiv 2410.07073
        (Pixtral); Fang et al. (2023), arXiv 2303.11331 (EVA-02).
    """

    paper, year = "Siméoni et al.", 2025
    extrapolates = False
    fractional = False
    needs_content = True
    for_text = False

    def __init__(
        self,
        model: ModelShape,
        *,
        rows: int | None = None,
        columns: int | None = None,
        prefix: int = 0,
        base: float = 100.0,
        frequencies: str = "axial",
        normalize: bool = True,
        layout: str = "half",
    ) -> None:
        super().__init__(model)
        if rows is None or columns is None:
            field = "rows" if rows is None else "columns"
            raise InputError(field, "rope2d turns by rows and columns of an image: expected their number, got None")
        for field, number, least in (("rows", rows, 1), ("columns", columns, 1), ("prefix", prefix, 0)):
            if number < least:
                raise InputError(field, f"expected at least {least}, got {number}")
        self.rows, self.columns, self.prefix = int(rows), int(columns), int(prefix)
        if self.rows * self.columns > MOST_POSITIONS:
            raise InputError("rows", f"expected at most {MOST_POSITIONS} cells, got {rows} x {columns}")
        self.length = self.prefix + self.rows * self.columns
        if model.head_dim % 4:
            raise InputError("head_dim", f"rope2d needs a multiple of 4, got {model.head_dim}")
        if base <= 0:
            raise InputError("base", f"expected a positive number, got {base}")
        if frequencies not in FREQUENCIES:
            raise InputError("frequencies", f"expected one of {', '.join(FREQUENCIES)}, got {frequencies!r}")
        if layout not in LAYOUTS:
            raise InputError("layout", f"expected one of {', '.join(LAYOUTS)}, got {layout!r}")
        self.base, self.frequencies, self.normalize, self.layout = base, frequencies, normalize, layout

    def prepare_for(self, site: Site, prepared: None = None) -> tuple[Turn, Turn]:
        """Return the turns of queries and of keys."""
        turn = self._turn(site.queries)
        return turn, turn if site.rotated_keys is site.queries else self._turn(site.rotated_keys)

    def rotate(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        query_turns, key_turns = self.shared_at(site)
        return rotated(query, query_turns, self.layout), rotated(key, key_turns, self.layout), value

    def _turn(self, positions: PositionsLike) -> Turn:
        device = positions.device if isinstance(positions, Tensor) else self._like.device
        if device.type == "mps":
            device = torch.device("cpu")  # MPS has no float64
        # Below 0 for the prefix
        cells = table_rows(positions, self.length, "rope2d", device, "prefix + rows * columns") - self.prefix
        pair = torch.arange(self.model.head_dim // 4, dtype=torch.float64, device=device)
        between = 0.5 if self.frequencies == "alternate" else 0.0
        angles = torch.cat(
            [
                self._places(cells, side, axis) * self.base ** (-4 * (pair + axis * between) / self.model.head_dim)
                for axis, side in enumerate((self.rows, self.columns))
            ],
            -1,
        )
        return turn_by(torch.where((cells < 0).unsqueeze(-1), 0.0, angles), self.layout, self._like)

    def _places(self, cells: Tensor, side: int, axis: int) -> Tensor:
        """Return the row (axis 0) or column (axis 1) of each cell, (n, 1) or (batch, n, 1) float64."""
        places = (cells % self.columns if axis else cells // self.columns).to(torch.float64).unsqueeze(-1)
        return 2 * math.pi * (2 * (places + 0.5) / side - 1) if self.normalize else places
