"""A training up to some step, which a run saves and another continues."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from ...files import new_folder
from ...lab import manifest
from ...lab.json_files import from_json, read_json, write_json
from ...lab.store import refuse_other_settings
from .checkpoint import SentenceEncoder
from .results import Judged

WEIGHTS, OPTIMIZER, FACTS = "model.safetensors", "optimizer.pt", "state.json"


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
        with new_folder(folder) as partial:
            save_model(student.model, str(partial / WEIGHTS))
            torch.save(optimizer.state_dict(), partial / OPTIMIZER)
            write_json(partial / FACTS, asdict(self))
            manifest.write(partial, settings)

    @classmethod
    def load(
        cls, folder: Path, student: SentenceEncoder, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
    ) -> tuple[TrainingState, str | None]:
        """Load a checkpoint into the student and its optimizer.

        Returns:
            The state, and why the checkpoint is passed over, if it is. Then, and without one, the state is that of the
            beginning.

        Raises:
            InputError: if the checkpoint is of other settings.
        """
        if not folder.exists():
            return cls(), None
        if saved := manifest.facts(folder):
            refuse_other_settings(folder, saved, settings)
        if (problem := manifest.problem(folder, settings)) is not None:
            return cls(), problem
        load_model(student.model, folder / WEIGHTS)
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True))
        return from_json(cls, read_json(folder / FACTS)), None
