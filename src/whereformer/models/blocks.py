"""Funnel-Transformer's notation for layers ("6-3x2-3x2"), which describes BERT and ALBERT too."""

import re
from typing import NamedTuple

from ..errors import InputError, shown

MOST_LAYERS = 1000
"""The most layers, counted once per pass, which is what the deepest Transformers have."""


class Block(NamedTuple):
    """``layers`` distinct layers, each run ``repeats`` times in a row."""

    layers: int
    repeats: int


def parse_blocks(blocks: str, name: str = "blocks") -> tuple[Block, ...]:
    """Parse Funnel's notation: blocks separated by "-", ``DxR`` for D distinct layers that each run R times in a row.

    "12" is BERT-base, "1x12" is ALBERT (one layer twelve times), and "4-4-4" and "6-3x2-3x2" are funnels. Errors call
    the argument ``name``.

    Raises:
        ValueError: for anything else, and for more than MOST_LAYERS layers.
    """
    parsed = []
    for part in str(blocks).split("-", MOST_LAYERS):
        # More digits than Python reads would be an error of another kind.
        match = re.fullmatch(r"([1-9][0-9]{0,20})(?:x([1-9][0-9]{0,20}))?", part)
        if match is None:
            raise InputError(name, f"expected layers as '12', '1x12' or '4-4-4', got {shown(blocks)}")
        parsed.append(Block(int(match[1]), int(match[2] or 1)))
    passes = sum(block.layers * block.repeats for block in parsed)
    if passes > MOST_LAYERS:
        raise InputError(name, f"expected at most {MOST_LAYERS} layers, got {passes}")
    return tuple(parsed)
