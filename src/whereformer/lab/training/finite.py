"""The callback that stops a diverged training of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from ..fit import check_finite


class FiniteWatch(TrainerCallback):
    """A callback that raises an error when a loss or the norm of the gradients is not finite.

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
