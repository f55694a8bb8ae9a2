"""The options of an analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_POSITIONS = 512
"""The most positions that are analyzed by default."""
TOKENS = 8192
"""Tokens of text over which attention is measured by default."""


@dataclass(frozen=True)
class AnalyzeOptions:
    """The options of an analysis.

    Args:
        length: number of positions; None for the model's own, up to ``MOST_POSITIONS``.
        max_kernels: the number of kernels of the largest fit.
        pages: pages of text, or None to measure no attention.
        text_source: where they come from, for people to read.
        text_needed: whether a model without a tokenizer is an error, because the user gave the text.
        tokens: about how many tokens are read.
    """

    length: int | None
    max_kernels: int
    pages: Sequence[str] | None
    text_source: str
    text_needed: bool
    tokens: int = TOKENS
