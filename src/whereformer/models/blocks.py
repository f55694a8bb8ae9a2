"""The notations for layers, Funnel-Transformer's ("6-3x2-3x2"), and for their windows ("128,128,0")."""

import re
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from ..errors import InputError, short_repr
from .checks import MAX_IDS

MAX_LAYERS = 1000
"""The largest number of layers, counted once per pass, as in the deepest Transformers."""


class Block(NamedTuple):
    """``layers`` distinct layers, each run ``repeats`` times in a row."""

    layers: int
    repeats: int


def parse_blocks(blocks: str, name: str = "blocks") -> tuple[Block, ...]:
    """Parse Funnel's notation: blocks separated by "-", ``DxR`` for D distinct layers that each run R times in a row.

    "12" is BERT-base, "1x12" is ALBERT (one layer twelve times), and "4-4-4" and "6-3x2-3x2" are funnels. Errors call
    the argument ``name``.

    Raises:
        ValueError: for anything else, and for more than MAX_LAYERS layers.
    """
    parsed = []
    for part in str(blocks).split("-", MAX_LAYERS):
        # More digits than Python reads would be an error of another kind.
        match = re.fullmatch(r"([1-9][0-9]{0,20})(?:x([1-9][0-9]{0,20}))?", part)
        if match is None:
            raise InputError(name, f"expected layers as '12', '1x12' or '4-4-4', got {short_repr(blocks)}")
        parsed.append(Block(int(match[1]), int(match[2] or 1)))
    passes = sum(block.layers * block.repeats for block in parsed)
    if passes > MAX_LAYERS:
        raise InputError(name, f"expected at most {MAX_LAYERS} layers, got {passes}")
    return tuple(parsed)


def parse_windows(windows: str | None, blocks: Sequence[Block], decoder: Sequence[Block]) -> tuple[int | None, ...]:
    """Return the window of every pass through a layer, in order, the decoder's last; None for a pass without a window.

    "128,128,0" gives two layers windows of 128 positions and the third none, and so on in turn. None: no windows.

    Raises:
        ValueError: for anything else, and a window below the distance of neighbors in a pooled block.
    """
    strides = [2**index for index, block in enumerate(blocks) for _ in range(block.layers * block.repeats)]
    strides += [1] * sum(block.layers * block.repeats for block in decoder)
    if windows is None:
        return (None,) * len(strides)
    # More digits than Python reads would be an error of another kind.
    if not isinstance(windows, str) or not re.fullmatch(r" *[0-9]{1,20} *(, *[0-9]{1,20} *)*", windows, re.ASCII):
        expected = "numbers as '128' or '128,128,0' (0: no window)"
        raise InputError("windows", f"expected {expected}, got {short_repr(windows)}")
    numbers = [int(number) for number in windows.split(",")]
    if max(numbers) > MAX_IDS:
        raise InputError("windows", f"expected at most {MAX_IDS}, got {max(numbers)}")
    layer_windows = tuple(number or None for number in islice(cycle(numbers), len(strides)))
    for window, stride in zip(layer_windows, strides, strict=True):
        if window is not None and window < stride:
            reason = f"expected at least {stride} where pooled tokens are {stride} positions apart, got {window}"
            raise InputError("windows", reason)
    return layer_windows
