"""The check that stops a diverged training, with advice about the learning rate."""

from __future__ import annotations

import math

from ..errors import InputError


def check_finite(what: str, value: float, steps: int, learning_rate: float, advice: str = "") -> None:
    """Check that a loss or another number of a training is finite.

    Args:
        what: the number's name.
        value: the number.
        steps: steps taken so far.
        learning_rate: the peak learning rate; the message suggests a quarter of it.
        advice: more advice, appended to the message.
    Raises:
        InputError: for ``learning_rate``, if the number is not finite.
    """
    if not math.isfinite(value):
        raise InputError(
            "learning_rate",
            f"{what} is not a number after {steps} steps; {learning_rate} is too high, try {learning_rate / 4}{advice}",
        )
