"""No position information: attention as a bag of words."""

from __future__ import annotations

from .base import Position


class NoPosition(Position):
    """Tells the model nothing about order: the baseline that every method has to beat.

    Extrapolation: any length.
    """
