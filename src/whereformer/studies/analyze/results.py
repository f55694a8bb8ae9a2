"""Write an analysis's ``results.json``, and collect the facts that its report lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...analysis.findings import ModelFindings
from ...analysis.naming import RULES
from ...lab.json_files import write_json
from ...lab.provenance import provenance
from .settings import AnalyzeOptions

FORMAT = 1


def write_results(models: Sequence[ModelFindings], facts: dict[str, Any], path: Path) -> None:
    """Write ``results.json`` with ``format``, ``facts`` and ``models``, each from :meth:`ModelFindings.to_dict`."""
    found = [model.to_dict() for model in models]
    write_json(path, {"format": FORMAT, **provenance(), "facts": facts, "models": found})


def facts_of(options: AnalyzeOptions, command: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """Return what the report says besides the findings."""
    return {
        "command": list(command),
        "rules": dict(RULES),
        "score": "score",
        "notes": list(notes),
        "text": options.text_source if options.pages is not None else "none",
        "machine": provenance()["machine"],
    }
