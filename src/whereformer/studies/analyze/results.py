"""The findings of an analysis, and the files that they are saved to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...analysis.findings import ModelFindings
from ...errors import InputError
from ...lab.json_files import write_json
from ...lab.store import Results

if TYPE_CHECKING:
    from ...lab.sheet import Sheet


@dataclass(frozen=True, kw_only=True)
class AnalyzeResults(Results):
    """The results of an analysis.

    Args:
        models: the findings, at least one, in the order in which the page shows them; their names are unique.
        facts: what else the page says. ``command`` (a list of words) repeats the analysis, ``rules`` (kind of head ->
            rule, in order) says how heads are named, ``score`` is the name of the models' scores, and ``notes`` (a
            list) say what was left out. All other facts are listed at the end; dictionaries get their own heading.
    """

    FORMAT = 1

    models: Sequence[ModelFindings]
    facts: dict[str, Any]

    def write(self, path: Path) -> None:
        """Write the file. Matrices are averaged, and numbers rounded, see :meth:`ModelFindings.to_dict`."""
        origin = {name: getattr(self, name) for name in ("date", "commit", "machine", "versions")}
        found = [model.to_dict() for model in self.models]
        write_json(path, {"format": self.FORMAT, **origin, "facts": self.facts, "models": found})

    @classmethod
    def load(cls, path: Path) -> Self:
        """The file has less than the findings, so it cannot be read back.

        Raises:
            InputError: always.
        """
        raise InputError("out", f"{path} has rounded numbers, from which no page can be made; analyze the models again")

    @property
    def score(self) -> str:
        """The name of the models' scores."""
        return str(self.facts.get("score") or "score")

    def sheets(self) -> Sequence[Sheet]:
        from .report import sheets

        return sheets(self)

    def sentences(self) -> Sequence[str]:
        from .report import verdict

        return [verdict(self.models), *self.facts.get("notes", ())]

    def report(self) -> str:
        from .report import build_report

        return build_report(self)

    def more_files(self) -> dict[str, bytes]:
        from .pictures import drawn

        return {f"pictures/{name}": content for name, content in drawn(self.models, self.score).items()}
