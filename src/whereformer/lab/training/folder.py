"""The output folder of a long training: its settings, checkpoints, results and finished model.

It holds ``settings.json`` (everything that decides the result), ``results.json`` (losses, held-out scores, time),
``checkpoints/``, ``tensorboard/`` if that is installed and, once training has finished, ``model/`` with the tokenizer.
A checkpoint or model counts only if it is what its manifest says.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from transformers import PreTrainedModel

from ...errors import InputError
from ...files import check_folder, move_folder, new_folder
from ..json_files import check_seal, read_json, sealed, write_json
from ..progress import Progress
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
        if not file.exists():
            return self.kind.load(self.path).settings if self.path.exists() else None
        try:
            old = read_json(file)
            check_seal(old)
            if old.get("format") == FORMAT and isinstance(old.get("settings"), dict):
                return dict(old["settings"])
        except (OSError, ValueError):
            pass
        raise InputError("out", f"{file} is not complete or not of this command; move it away or choose another folder")

    def claim(self) -> None:
        """Save the settings, so that later runs with others are refused, and remove what is half written."""
        write_json(self.out / "settings.json", sealed({"format": FORMAT, "settings": self.settings}), indent=1)
        shutil.rmtree(self.beside, ignore_errors=True)

    def finished(self, progress: Progress) -> Kind | None:
        """Return the results if training has finished and the model is what was saved; else tell what is lost.

        Checkpoints have the results too, so damaged ones are written again.
        """
        try:
            results = self.kind.load(self.path) if self.path.exists() else None
        except InputError:
            progress.line(f"writing {self.path.name} again: it was damaged")
            return None
        if results is None or not results.finished:
            return None
        problem = manifest.problem(self.model, {"settings": self.settings})
        if problem is not None:
            progress.line(f"making {self.model.name}/ again: {problem}")
        return results if problem is None else None

    def newest_checkpoint(self, unusable: Callable[[int], str | None] = lambda step: None) -> Path | None:
        """Return the newest checkpoint that is what its manifest says, or None. It fills :attr:`passed_over`.

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
        if any(self.checkpoint(step).rglob("*.bin")):
            return "it has a .bin file, a pickle, which is never opened"
        return manifest.problem(self.checkpoint(step), {"step": step, "settings": self.settings}, alone=True)

    def accept(self, step: int, keep: int) -> None:
        """Put the checkpoint that lies beside its place there, with a manifest, and delete old ones.

        Args:
            step: the steps taken.
            keep: how many checkpoints to keep. Those that were passed over are deleted once a newer one is there.
        """
        place = self.checkpoint(step)
        complete = self.beside / place.name
        # The Trainer's arguments are a pickle, which nobody opens.
        (complete / "training_args.bin").unlink(missing_ok=True)
        manifest.write(complete, {"step": step, "settings": self.settings})
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
        """Save the trained model with its tokenizer and its model card, then the results."""
        with new_folder(self.model) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            write_card(partial, model, results, self.command)
            manifest.write(partial, {"settings": self.settings})
        results.write(self.path)

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints, whether they count or not."""
        found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in self.checkpoints.glob("*"))
        return [int(match[1]) for match in found if match]
