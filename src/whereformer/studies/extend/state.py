"""A training up to some step, which a run saves and another continues."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import InputError
from ...files import new_folder
from ...lab.json_files import from_json, read_json, write_json
from ...lab.training import manifest
from .checkpoint import SentenceEncoder
from .results import Judged

WEIGHTS, FACTS = "state.safetensors", "state.json"


@dataclass
class TrainingState:
    """What a training has besides its weights.

    Args:
        step: the steps so far.
        seconds: the CPU time so far.
        curve: the model on held-out documents.
        losses: each part of the loss, by step.
    """

    step: int = 0
    seconds: float = 0.0
    curve: list[Judged] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def save(
        self, folder: Path, student: SentenceEncoder, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
    ) -> None:
        """Write a checkpoint, completely or not at all."""
        tensors = {f"model.{name}": weights for name, weights in student.model.state_dict().items()}
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
        with new_folder(folder) as partial:
            save_file({name: value.contiguous().clone() for name, value in tensors.items()}, partial / WEIGHTS)
            write_json(partial / FACTS, asdict(self))
            manifest.write(partial, settings)

    @classmethod
    def load(
        cls, folder: Path, student: SentenceEncoder, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
    ) -> TrainingState:
        """Load a checkpoint into the student and its optimizer; without one, return the state of the beginning.

        Raises:
            InputError: if the checkpoint is damaged, or of other settings.
        """
        if not folder.exists():
            return cls()
        problem = manifest.problem(folder, settings)
        if problem is not None:
            raise InputError("out", f"{folder} can't be continued: {problem}; choose another folder")
        tensors = load_file(folder / WEIGHTS)
        student.model.load_state_dict(_below("model.", tensors))
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in _below("optimizer.", tensors).items():
            index, _, moment = name.partition(".")
            states.setdefault(int(index), {})[moment] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        return from_json(cls, read_json(folder / FACTS))


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
