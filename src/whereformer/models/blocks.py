"""Funnel-Transformer's notation for layers ("6-3x2-3x2"), which describes BERT and ALBERT too."""

import re
from typing import NamedTuple

from ..errors import InputError


class Block(NamedTuple):
    """``layers`` distinct layers, each run ``repeats`` times in a row."""

    layers: int
    repeats: int


def parse_blocks(blocks: str, name: str = "blocks") -> tuple[Block, ...]:
    """Parse Funnel's notation: blocks separated by "-", ``DxR`` for D distinct layers that each run R times in a row.

    "12" is BERT-base, "1x12" is ALBERT (one layer twelve times), and "4-4-4" and "6-3x2-3x2" are funnels. Errors call
    the argument ``name``.

    Raises:
        ValueError: for anything else.
    """
    parsed = []
    for part in str(blocks).split("-"):
        match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", part.strip())
        if match is None:
            raise InputError(name, f"expected layers as '12', '1x12' or '4-4-4', got {blocks!r}")
        parsed.append(Block(int(match[1]), int(match[2] or 1)))
    return tuple(parsed)
