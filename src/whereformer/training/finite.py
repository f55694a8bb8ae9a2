"""What is said when a training diverges."""

from __future__ import annotations

import math

from ..errors import InputError


def check_finite(what: str, value: float, steps: int, learning_rate: float, advice: str = "") -> None:
    """Raise unless a number of a training is finite.

    Args:
        what: the number's name.
        value: the number.
        steps: how many steps were taken before.
        learning_rate: its peak; a quarter of it is what to try.
        advice: what else to do, put behind that.
    Raises:
        InputError: about the learning rate.
    """
    if not math.isfinite(value):
        raise InputError(
            "learning_rate",
            f"{what} is not a number after {steps} steps; {learning_rate} is too high, try {learning_rate / 4}{advice}",
        )
