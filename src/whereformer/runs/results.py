"""Results that later runs of a command continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import InputError


def refuse_other_settings(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise unless a folder's settings are those of now.

    Raises:
        InputError: naming the first that differs.
    """
    for name, value in new.items():
        if old.get(name) == value:
            continue
        if name == "text":
            raise InputError("out", f"{out} holds results of other text; choose another folder")
        raise InputError(
            "out",
            f"{out} holds results with {name} {old.get(name)!r}, not {value!r}; "
            "choose another folder, or the same settings to continue",
        )


def read_results(path: Path, form: Any) -> dict[str, Any] | None:
    """What an earlier run left in ``results.json``, with its ``settings`` and ``runs``; None if there is none.

    Args:
        path: the file.
        form: what its ``format`` has to be.
    Raises:
        InputError: if it is something else.
    """
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != form or not (isinstance(found["settings"], dict) and isinstance(found["runs"], dict)):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "out", f"{path} is not a complete result of this command; move it away or choose another folder"
        ) from None
    return found
