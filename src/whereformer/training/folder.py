"""The folder of a long training: what it was made with, its checkpoints, its results, and the model that is for use.

It holds ``settings.json`` (what decides the result), ``results.json`` (losses, held-out scores, time),
``checkpoints/``, ``tensorboard/`` where that is installed and, once finished, ``model/`` with the tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from ..errors import InputError
from ..files import write_atomically
from ..runs.results import refuse_other_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
KEPT_CHECKPOINTS = 2
"""By default two, because the newest may be half written when the power fails."""


class Folder:
    """An output folder: what it was made with, its newest whole checkpoint, and its results.

    Args:
        out: the folder.
        settings: all that decides the result.
    Raises:
        InputError: if it holds a run with other settings, or something else.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out = out
        self.settings = settings
        self.path = out / "results.json"
        self.checkpoints = out / "checkpoints"
        self.model = out / "model"
        file = out / "settings.json"
        if file.exists():
            old = _read_json(file)
            if old.get("format") != FORMAT or not isinstance(old.get("settings"), dict):
                raise InputError("out", f"{file} is not of this command; choose another folder")
            refuse_other_settings(out, old["settings"], settings)
        elif self.path.exists():
            raise InputError("out", f"{self.path} is not of this command; choose another folder")

    def claim(self) -> None:
        """Keep the settings, so that later runs are held against them."""
        content = {"format": FORMAT, "settings": self.settings}
        write_atomically(self.out / "settings.json", json.dumps(content, indent=1, allow_nan=False))

    def finished(self) -> dict[str, Any] | None:
        """The results, if training is over and its model is there."""
        if not (self.path.exists() and (self.model / "config.json").exists()):
            return None
        results = _read_json(self.path)
        return results if results.get("finished") is True else None

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

    def write(self, results: dict[str, Any]) -> None:
        """Replace the results."""
        write_atomically(self.path, json.dumps(results, indent=1, allow_nan=False))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    raise InputError("out", f"{file} is not complete; move it away or choose another folder")


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what is for use, model and tokenizer, to ``folder``, whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
