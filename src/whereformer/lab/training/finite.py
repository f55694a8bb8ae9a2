"""The check that stops a diverged training, with advice about the learning rate."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from ...errors import InputError


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
            f"{what} is not a number after {steps} steps; {learning_rate:g} is too high, try {learning_rate / 4:g}"
            f"{advice}",
        )


class FiniteWatch(TrainerCallback):
    """A callback that raises an error when a loss or the norm of the gradients is not a number.

    Args:
        learning_rate: the peak learning rate, for the advice in the error message.
        advice: more advice, appended to the message.
    """

    def __init__(self, learning_rate: float, advice: str) -> None:
        self.learning_rate = learning_rate
        self.advice = advice

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        for name, value in (logs or {}).items():
            if name == "grad_norm" or name.endswith("loss"):
                check_finite(name, value, state.global_step, self.learning_rate, self.advice)
        self.logged(state.global_step, logs or {})

    def logged(self, step: int, logs: dict[str, float]) -> None:
        """Handle what is logged after a step; its losses are numbers."""
