"""Average the weights of the last checkpoints, which are copied to ``averaging/`` in the run's folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

from ...files import new_folder
from ...lab import manifest, ranks
from ...lab.training.folder import Folder

WEIGHTS = "model.safetensors"
"""The file of a checkpoint's weights."""


class Averaging(TrainerCallback):
    """The callback that copies the weights to be averaged.

    Args:
        folder: the run's folder.
        steps: the steps whose weights are averaged.
    """

    def __init__(self, folder: Folder[Any], steps: Sequence[int]) -> None:
        self.folder = folder
        self.steps = frozenset(steps)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if ranks.is_main():
            self.keep(state.global_step)

    def keep(self, step: int) -> None:
        """Copy a checkpoint's weights if they are among those to average.

        Raises:
            InputError: if the disk is full.
        """
        if step in self.steps:
            with new_folder(self.place(step)) as partial:
                shutil.copyfile(self.folder.checkpoint(step) / WEIGHTS, partial / WEIGHTS)
                manifest.write(partial, self._facts(step))

    def problem(self, newest: int, model: nn.Module) -> str | None:
        """Return why the weights up to a checkpoint are not all here, or None if they are, and the model's.

        Those that are missing or damaged are copied again if their checkpoints still are there.
        """
        for step in sorted(step for step in self.steps if step <= newest):
            reason = self._problem(step)
            if reason is not None and self.folder.problem(step) is None:
                # The run may have stopped after saving the checkpoint and before copying it.
                self.keep(step)
                reason = self._problem(step)
            if reason is not None:
                return f"the average also needs averaging/{self.place(step).name}, but {reason}"
        return None

    def _problem(self, step: int) -> str | None:
        return manifest.problem(self.place(step), self._facts(step))

    def place(self, step: int) -> Path:
        """Return the folder for the weights after a step."""
        return self.folder.out / "averaging" / f"step-{step}"

    def _facts(self, step: int) -> dict[str, Any]:
        return {"step": step, "settings": self.folder.settings}

    def load_mean(self, model: nn.Module) -> None:
        """Load the mean of the weights into a model."""
        sums: dict[str, Tensor] = {}
        for step in sorted(self.steps):
            for name, weight in load_file(self.place(step) / WEIGHTS).items():
                sums[name] = sums[name] + weight.double() if name in sums else weight.double()
        means = {name: weight / len(self.steps) for name, weight in sums.items()}
        # Tied weights are saved once.
        unknown = model.load_state_dict(means, strict=False).unexpected_keys
        assert not unknown, unknown
