"""No position information: attention as a bag of words."""

from __future__ import annotations

from .base import PositionMethod


class NoPosition(PositionMethod):
    """Adds no position: the baseline that every method has to beat.

    Papers about causal models call it NoPE (no positional encoding), and ``nope`` is an alias of ``none``. A causal
    model knows something about positions even so, because early tokens see fewer keys.

    Extrapolation: any length.
    Source: Kazemnejad et al. (2023), arXiv 2305.19466, for causal models.
    """

    paper, year = "Kazemnejad et al.", 2023
    shift_invariant = True
