"""Keep each finished part of a long benchmark in a file, so that an interrupted benchmark loses only one part."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whereformer.errors import InputError
from whereformer.provenance import write_results


def kept(file: Path, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results in ``file``; they are made and written there first if need be.

    Raises:
        InputError: if they were made with other settings.
    """
    if not file.exists():
        write_results(file, {"settings": dict(settings), **make()})
    found: dict[str, Any] = json.loads(file.read_text())
    for name, value in settings.items():
        if found["settings"].get(name) != value:
            raise InputError(
                "out", f"{file.parent} holds results with {name} {found['settings'].get(name)}, not {value}"
            )
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Format the median of values, their range and their number; "-" for none."""
    if not values:
        return "-"
    least, most = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({least:.{digits}f}-{most:.{digits}f}, n={len(values)})"
