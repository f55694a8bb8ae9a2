"""Average the weights of the last checkpoints, which are copied to ``averaging/`` in the run's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

from ...errors import InputError
from ...runs import ranks
from ...training.folder import Folder


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
        """Copy a checkpoint's weights if they are among those to average."""
        if step in self.steps:
            file = self.file(step)
            file.parent.mkdir(exist_ok=True)
            partial = file.with_name(file.name + ".partial")
            shutil.copyfile(self.folder.checkpoints / f"checkpoint-{step}" / "model.safetensors", partial)
            os.replace(partial, file)

    def complete(self, newest: int) -> None:
        """Check that no weights up to the newest checkpoint are missing.

        Raises:
            InputError: if some are.
        """
        # The run may have stopped after saving the checkpoint and before copying it.
        self.keep(newest)
        for step in sorted(self.steps):
            if step <= newest and not self.file(step).exists():
                raise InputError("out", f"{self.file(step)} is missing, and its weights are needed for the average")

    def file(self, step: int) -> Path:
        """Return the file for the weights after a step."""
        return self.folder.out / "averaging" / f"step-{step}.safetensors"

    def load_mean(self, model: nn.Module) -> None:
        """Load the mean of the weights into a model."""
        sums: dict[str, Tensor] = {}
        for step in sorted(self.steps):
            for name, weight in load_file(self.file(step)).items():
                sums[name] = sums[name] + weight.double() if name in sums else weight.double()
        means = {name: weight / len(self.steps) for name, weight in sums.items()}
        # Tied weights are saved once.
        unknown = model.load_state_dict(means, strict=False).unexpected_keys
        assert not unknown, unknown
