"""The output folder of a long training: its settings, checkpoints, results and finished model.

It holds ``settings.json`` (everything that decides the result), ``results.json`` (losses, held-out scores, time),
``checkpoints/``, ``tensorboard/`` if that is installed and, once training has finished, ``model/`` with the tokenizer.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from ..errors import InputError
from ..runs.results import read_json, refuse_other_settings, write_json
from .card import write_card
from .results import TrainingResults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
"""Format version of ``settings.json``."""
KEPT_CHECKPOINTS = 2
"""How many checkpoints are kept by default: two, because a power failure may leave the newest half written."""


Kind = TypeVar("Kind", bound=TrainingResults)


class Folder(Generic[Kind]):
    """The output folder of a training, with its settings, checkpoints and results.

    Args:
        out: the folder.
        settings: everything that decides the result.
        kind: the dataclass of its results.
        command: the command of this training, for the model card.

    Raises:
        InputError: if the folder holds a run with other settings, or files of another command.
    """

    def __init__(self, out: Path, settings: dict[str, Any], kind: type[Kind], command: str = "") -> None:
        self.out = out
        self.command = command
        self.settings = settings
        self.kind = kind
        self.path = out / "results.json"
        self.checkpoints = out / "checkpoints"
        self.model = out / "model"
        file = out / "settings.json"
        if file.exists():
            try:
                old = read_json(file)
            except (OSError, ValueError):
                raise InputError("out", f"{file} is not complete; move it away or choose another folder") from None
            if old.get("format") != FORMAT or not isinstance(old.get("settings"), dict):
                raise InputError("out", f"{file} is not of this command; choose another folder")
            refuse_other_settings(out, old["settings"], settings)
        elif self.path.exists():
            raise InputError("out", f"{self.path} is not of this command; choose another folder")

    def claim(self) -> None:
        """Save the settings, so that later runs with different settings are refused."""
        write_json(self.out / "settings.json", {"format": FORMAT, "settings": self.settings}, indent=1)

    def finished(self) -> Kind | None:
        """Return the results if training has finished and the model is saved, else None."""
        if not (self.path.exists() and (self.model / "config.json").exists()):
            return None
        results = self.kind.load(self.path)
        return results if results.finished else None

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint, or None, and delete incomplete ones that are newer."""
        while self.checkpoints.exists():
            found = get_last_checkpoint(str(self.checkpoints))
            if found is None:
                return None
            try:
                # The Trainer writes this file last.
                TrainerState.load_from_json(str(Path(found) / "trainer_state.json"))
            except (OSError, ValueError, TypeError):
                shutil.rmtree(found)
            else:
                return Path(found)
        return None


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, results: TrainingResults, command: str
) -> None:
    """Save the model, its tokenizer and its model card to ``folder``, completely or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    write_card(partial, model, results, command)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
