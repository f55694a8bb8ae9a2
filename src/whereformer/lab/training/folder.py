"""The output folder of a long training: its settings, checkpoints, results and finished model.

It holds ``settings.json`` (everything that decides the result), ``results.json`` (losses, held-out scores, time),
``checkpoints/``, ``tensorboard/`` if that is installed and, once training has finished, ``model/`` with the tokenizer.
A checkpoint or model counts only if it is what its manifest says.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from transformers import PreTrainedModel

from ...errors import InputError
from ...files import check_folder, move_folder, new_folder
from ..json_files import check_seal, read_json, sealed, write_json
from ..store import refuse_other_settings
from . import manifest
from .card import write_card
from .results import TrainingResults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
"""Format version of ``settings.json``."""
KEPT_CHECKPOINTS = 2
"""How many checkpoints are kept by default: two, because the newest may be damaged."""


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
        self.beside = self.checkpoints / "new.partial"
        """Where the Trainer writes a checkpoint before it counts."""
        self.passed_over: dict[str, str] = {}
        """The names of newer checkpoints that :meth:`newest_checkpoint` did not return, with the reasons."""
        for part in (self.checkpoints, self.model, out / "tensorboard"):
            check_folder("out", part)
        old = self._earlier_settings()
        if old is not None:
            refuse_other_settings(out, old, settings)

    def _earlier_settings(self) -> dict[str, Any] | None:
        """Return the settings of an earlier run in this folder; the results have them too."""
        file = self.out / "settings.json"
        broken = False
        if file.exists():
            try:
                old = read_json(file)
                check_seal(old)
            except (OSError, ValueError):
                broken = True
            else:
                if old.get("format") != FORMAT or not isinstance(old.get("settings"), dict):
                    raise InputError("out", f"{file} is not of this command; choose another folder")
                return dict(old["settings"])
        if self.path.exists():
            try:
                return self.kind.load(self.path).settings
            except InputError:
                if not broken:
                    raise InputError("out", f"{self.path} is not of this command; choose another folder") from None
        if broken:
            raise InputError("out", f"{file} is not complete; move it away or choose another folder")
        return None

    def claim(self) -> None:
        """Save the settings, so that later runs with others are refused, and remove what is half written."""
        write_json(self.out / "settings.json", sealed({"format": FORMAT, "settings": self.settings}), indent=1)
        shutil.rmtree(self.beside, ignore_errors=True)

    def finished(self) -> Kind | None:
        """Return the results if training has finished and the model is what was saved, else None."""
        results = self._results()
        return results if results is not None and results.finished and self._model_problem is None else None

    def damage(self) -> str | None:
        """Return what a finished run lost, in a line for the user; None if nothing is known to be lost."""
        results = self._results()
        if results is None:
            return f"writing {self.path.name} again: it was damaged" if self.path.exists() else None
        if not results.finished or self._model_problem is None:
            return None
        return f"making {self.model.name}/ again: {self._model_problem}"

    def _results(self) -> Kind | None:
        """Return the saved results; None if there are none or they are damaged, since checkpoints have them too."""
        try:
            return self.kind.load(self.path) if self.path.exists() else None
        except InputError:
            return None

    @cached_property
    def _model_problem(self) -> str | None:
        """Why the model is not what was saved. Every byte is read once, since nothing but :meth:`finish` writes it."""
        return manifest.problem(self.model, {"settings": self.settings})

    def newest_checkpoint(self, unusable: Callable[[int], str | None] = lambda step: None) -> Path | None:
        """Return the newest checkpoint that is what its manifest says, or None.

        The others that are newer stay where they are, in :attr:`passed_over`.

        Args:
            unusable: returns a further reason why a step's checkpoint can't be used, or None.
        """
        self.passed_over = {}
        for step in sorted(self._steps(), reverse=True):
            reason = self.problem(step) or unusable(step)
            if reason is None:
                return self.checkpoint(step)
            self.passed_over[self.checkpoint(step).name] = reason
        return None

    def checkpoint(self, step: int) -> Path:
        """Return the folder for the checkpoint after a step."""
        return self.checkpoints / f"checkpoint-{step}"

    def problem(self, step: int) -> str | None:
        """Return why a step's checkpoint does not count, or None if it does."""
        place = self.checkpoint(step)
        if any(place.rglob("*.bin")):
            return "it has a .bin file, a pickle, which is never opened"
        return manifest.problem(place, self._facts(step), alone=True)

    def accept(self, step: int, keep: int) -> None:
        """Put the checkpoint that lies beside its place there, with a manifest, and delete old ones.

        Args:
            step: the steps taken.
            keep: how many checkpoints to keep. Those that were passed over are deleted once a newer one is there.

        Raises:
            InputError: if the disk is full.
        """
        place = self.checkpoint(step)
        complete = self.beside / place.name
        # The Trainer's arguments are a pickle, which nobody opens.
        (complete / "training_args.bin").unlink(missing_ok=True)
        manifest.write(complete, self._facts(step))
        check_folder(None, place)
        move_folder(complete, place)
        shutil.rmtree(self.beside)
        self.passed_over.pop(place.name, None)
        older = [each for each in sorted(self._steps(), reverse=True) if each <= step]
        good = [each for each in older if self.checkpoint(each).name not in self.passed_over]
        for each in older:
            if each not in good[:keep]:
                shutil.rmtree(self.checkpoint(each), ignore_errors=True)

    def finish(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, results: Kind) -> None:
        """Save the trained model with its tokenizer and its model card, then the results.

        Raises:
            InputError: if the disk is full.
        """
        with new_folder(self.model) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            write_card(partial, model, results, self.command)
            manifest.write(partial, {"settings": self.settings})
        self.__dict__.pop("_model_problem", None)
        results.write(self.path)

    def _facts(self, step: int) -> dict[str, Any]:
        return {"step": step, "settings": self.settings}

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints, whether they count or not."""
        if not self.checkpoints.is_dir():
            return []
        found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in self.checkpoints.iterdir())
        return [int(match[1]) for match in found if match]
