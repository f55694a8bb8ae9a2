"""The mean of the last checkpoints, whose weights are put aside in ``averaging/`` of the run's folder."""

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
from ...training.folder import Folder


class Averaging(TrainerCallback):
    """Puts aside the weights that the model will be the mean of.

    Args:
        folder: of the run.
        steps: after which they are.
    """

    def __init__(self, folder: Folder[Any], steps: Sequence[int]) -> None:
        self.folder = folder
        self.steps = frozenset(steps)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.keep(state.global_step)

    def keep(self, step: int) -> None:
        """Copy a checkpoint's weights, if they are wanted."""
        if step in self.steps:
            file = self.file(step)
            file.parent.mkdir(exist_ok=True)
            partial = file.with_name(file.name + ".partial")
            shutil.copyfile(self.folder.checkpoints / f"checkpoint-{step}" / "model.safetensors", partial)
            os.replace(partial, file)

    def complete(self, newest: int) -> None:
        """Make sure that nothing up to the newest checkpoint is missing.

        Raises:
            InputError: if something is.
        """
        # It may have been stopped between the checkpoint and its copy.
        self.keep(newest)
        for step in sorted(self.steps):
            if step <= newest and not self.file(step).exists():
                raise InputError("out", f"{self.file(step)} is missing, which the model is to be a mean of")

    def file(self, step: int) -> Path:
        """Where the weights after a step are."""
        return self.folder.out / "averaging" / f"step-{step}.safetensors"

    def load_mean(self, model: nn.Module) -> None:
        """Give a model the mean of the weights."""
        sums: dict[str, Tensor] = {}
        for step in sorted(self.steps):
            for name, weight in load_file(self.file(step)).items():
                sums[name] = sums[name] + weight.double() if name in sums else weight.double()
        means = {name: weight / len(self.steps) for name, weight in sums.items()}
        # Tied weights are saved once.
        unknown = model.load_state_dict(means, strict=False).unexpected_keys
        assert not unknown, unknown
