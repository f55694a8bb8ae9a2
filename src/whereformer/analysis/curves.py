"""``head_curves``: what each head of an encoder adds to scores at each offset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..models import Encoder

OFFSETS_SHOWN = 16
"""The number of offsets on each side for which attention measured over text is kept and drawn."""


@torch.no_grad()
def head_curves(encoder: Encoder, reach: int) -> list[list[list[float]]] | None:
    """Return what each head adds to scores at offsets -reach .. reach, [layer][head][offset], to four decimals.

    The result is None for a position method without such a curve.
    """
    offsets = torch.arange(-reach, reach + 1, device=encoder.device)
    curves = []
    for layer in range(encoder.config.num_hidden_layers):
        curve = encoder.position.curve(offsets, layer=layer)
        if curve is None:
            return None
        curves.append([[round(value, 4) for value in head] for head in curve.tolist()])
    return curves
