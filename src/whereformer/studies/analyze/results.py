"""The findings of an analysis, and the files that they are saved to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...analysis.findings import ModelFindings
from ...analysis.naming import RULES
from ...errors import InputError
from ...lab.json_files import write_json
from ...lab.sheet import Sheet
from ...lab.store import Results
from .pictures import drawn
from .report import build_report, sheets, verdict


@dataclass(frozen=True, kw_only=True)
class AnalyzeResults(Results):
    """The results of an analysis.

    Args:
        models: the findings, at least one, in the order in which the page shows them; their names are unique.
        text: where the text came from over which attention was measured; "none" without.
        notes: what was left out.
        command: the words of the command that repeats the analysis.
    """

    FORMAT = 1

    models: Sequence[ModelFindings]
    text: str = "none"
    notes: Sequence[str] = ()
    command: Sequence[str] = ()

    def write(self, path: Path) -> None:
        """Write the file. Matrices are averaged, and numbers rounded, see :meth:`ModelFindings.to_dict`."""
        facts = {"command": self.command, "rules": RULES, "notes": self.notes, "text": self.text}
        origin = {name: getattr(self, name) for name in ("date", "commit", "machine", "versions")}
        models = [model.to_dict() for model in self.models]
        write_json(path, {"format": self.FORMAT, **origin, "facts": facts, "models": models})

    @classmethod
    def load(cls, path: Path) -> Self:
        """The file has less than the findings, so it cannot be read back.

        Raises:
            InputError: always.
        """
        raise InputError("out", f"{path} has rounded numbers, from which no page can be made; analyze the models again")

    def sheets(self) -> Sequence[Sheet]:
        return sheets(self)

    def sentences(self) -> Sequence[str]:
        return [verdict(self.models), *self.notes]

    def report(self) -> str:
        return build_report(self)

    def more_files(self) -> dict[str, bytes]:
        return {f"pictures/{name}": content for name, content in drawn(self.models).items()}
