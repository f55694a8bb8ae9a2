"""The notation for the windows of an encoder's layers ("128,128,0"), repeated over the layers in turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import cycle, islice

from ..errors import InputError, shown
from .blocks import Block
from .checks import MOST_IDS


def parse_windows(windows: str | None, blocks: Sequence[Block], decoder: Sequence[Block]) -> tuple[int | None, ...]:
    """Return the window of every pass through a layer, in order, the decoder's last; None where there is none.

    "128,128,0" gives two layers windows of 128 positions and the third none, and so on in turn. None is no windows.

    Raises:
        ValueError: for anything else, and a window below the distance of neighbors in a pooled block.
    """
    strides = [2**index for index, block in enumerate(blocks) for _ in range(block.layers * block.repeats)]
    strides += [1] * sum(block.layers * block.repeats for block in decoder)
    if windows is None:
        return (None,) * len(strides)
    # More digits than Python reads would be an error of another kind.
    if not isinstance(windows, str) or not re.fullmatch(r" *[0-9]{1,20} *(, *[0-9]{1,20} *)*", windows, re.ASCII):
        raise InputError("windows", f"expected numbers as '128' or '128,128,0' (0: no window), got {shown(windows)}")
    numbers = [int(number) for number in windows.split(",")]
    if max(numbers) > MOST_IDS:
        raise InputError("windows", f"expected at most {MOST_IDS}, got {max(numbers)}")
    found = tuple(number or None for number in islice(cycle(numbers), len(strides)))
    for window, stride in zip(found, strides, strict=True):
        if window is not None and window < stride:
            reason = f"expected at least {stride} where pooled tokens are {stride} positions apart, got {window}"
            raise InputError("windows", reason)
    return found
