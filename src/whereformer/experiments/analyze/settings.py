"""What is looked at in the models that are analysed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_POSITIONS = 512
"""Positions that are looked at by default, at most."""
TOKENS = 8192
"""Tokens of text over which attention is measured by default."""


@dataclass(frozen=True)
class AnalyzeOptions:
    """What is looked at.

    Args:
        length: positions; None for what the model was made for, up to ``MOST_POSITIONS``.
        max_kernels: S of the largest fit.
        pages: of text, or None to measure no attention.
        text_source: where they come from, for people.
        text_needed: whether a model without a tokenizer is an error, because the user gave the text.
        tokens: that are read, about.
    """

    length: int | None
    max_kernels: int
    pages: Sequence[str] | None
    text_source: str
    text_needed: bool
    tokens: int = TOKENS
