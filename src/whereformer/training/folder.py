"""The folder of a long training: what it was made with, its checkpoints, its results, and the model that is for use.

It holds ``settings.json`` (what decides the result), ``results.json`` (losses, held-out scores, time),
``checkpoints/``, ``tensorboard/`` where that is installed and, once finished, ``model/`` with the tokenizer.
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
from .results import TrainingResults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
"""Of ``settings.json``."""
KEPT_CHECKPOINTS = 2
"""By default two, because the newest may be half written when the power fails."""


Kind = TypeVar("Kind", bound=TrainingResults)


class Folder(Generic[Kind]):
    """An output folder: what it was made with, its newest whole checkpoint, and its results.

    Args:
        out: the folder.
        settings: all that decides the result.
        kind: of its results.
    Raises:
        InputError: if it holds a run with other settings, or something else.
    """

    def __init__(self, out: Path, settings: dict[str, Any], kind: type[Kind]) -> None:
        self.out = out
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
        """Keep the settings, so that later runs with others are refused."""
        write_json(self.out / "settings.json", {"format": FORMAT, "settings": self.settings}, indent=1)

    def finished(self) -> Kind | None:
        """The results, if training is over and its model is there."""
        if not (self.path.exists() and (self.model / "config.json").exists()):
            return None
        results = self.kind.load(self.path)
        return results if results.finished else None

    def newest_checkpoint(self) -> Path | None:
        """The last checkpoint that was written to its end; half-written ones are removed."""
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


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what is for use, model and tokenizer, to ``folder``, whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
