"""The output folder of a long training: its results, checkpoints and finished model.

It holds ``results.json`` (everything that decides the result, losses, held-out scores, time), ``checkpoints/``,
``tensorboard/`` if it reports to that and, once training has finished, ``model/`` with the tokenizer. A checkpoint or
model counts only if it is what its manifest says.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from transformers import PreTrainedModel

from ...files import move_folder, new_folder
from .. import manifest
from ..progress import Progress
from ..store import FILE
from .card import write_card
from .results import TrainingResults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
        InputError: if the folder holds a run with other settings, or results of another command.
    """

    def __init__(self, out: Path, settings: dict[str, Any], kind: type[Kind], command: str = "") -> None:
        self.out = out
        self.command = command
        self.settings = settings
        self.kind = kind
        self.path = out / FILE
        self.checkpoints = out / "checkpoints"
        self.model = out / "model"
        self.beside = self.checkpoints / "new.partial"
        """Where the Trainer writes a checkpoint before it counts."""
        self.passed_over: dict[str, str] = {}
        """The names of newer checkpoints that :meth:`newest_checkpoint` did not return, with the reasons."""
        self.earlier = kind.earlier(out, settings=settings)
        """The results of an earlier run."""

    def claim(self, start: Kind) -> None:
        """Write the results before the first step, so that other settings are refused; remove what is half written."""
        if self.earlier is None:
            start.write(self.path)
        shutil.rmtree(self.beside, ignore_errors=True)

    def finished(self, progress: Progress) -> Kind | None:
        """Return the results if training has finished and the model is what was saved; else tell what is lost."""
        if self.earlier is None or not self.earlier.finished:
            return None
        problem = manifest.problem(self.model, {"settings": self.settings})
        if problem is None:
            return self.earlier
        progress.line(f"making {self.model.name}/ again: {problem}")
        return None

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

    def accept(self, step: int, keep: int, pinned: Sequence[int] = ()) -> None:
        """Put the checkpoint that lies beside its place there, with a manifest, and delete old ones.

        Args:
            step: the steps taken.
            keep: how many checkpoints to keep. Those that were passed over are deleted once a newer one is there.
            pinned: the steps of checkpoints to keep besides.
        """
        place = self.checkpoint(step)
        complete = self.beside / place.name
        # The Trainer's arguments are a pickle, which nobody opens.
        (complete / "training_args.bin").unlink(missing_ok=True)
        manifest.write(complete, {"step": step, "settings": self.settings})
        move_folder(complete, place)
        shutil.rmtree(self.beside)
        self.passed_over.pop(place.name, None)
        older = [each for each in sorted(self._steps(), reverse=True) if each <= step]
        good = [each for each in older if self.checkpoint(each).name not in self.passed_over]
        for each in older:
            if each not in good[:keep] and each not in pinned:
                shutil.rmtree(self.checkpoint(each), ignore_errors=True)

    def finish(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, results: Kind) -> None:
        """Save the trained model with its tokenizer and its model card, then the results."""
        with new_folder(self.model) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            text, facts = asdict(results.text), vars(results)
            write_card(partial, model, results.parameters, text, results.scores, results.settings, self.command, facts)
            manifest.write(partial, {"settings": self.settings})
        results.write(self.path)

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints, whether they count or not."""
        found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in self.checkpoints.glob("*"))
        return [int(match[1]) for match in found if match]
