"""The manifest of a saved folder: its files with sizes and hashes, and what they are of. Without it, nothing counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .json_files import read_sealed, write_sealed
from .provenance import versions

NAME = "manifest.json"
NOT_LISTED = {NAME, "README.md", ".lock"}
"""Files that decide nothing, of which people may edit the model card."""


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files in a folder; ``facts`` says as JSON what they are of, such as the settings."""
    files = {name: describe(path) for name, path in _files(folder).items()}
    write_sealed(folder / NAME, {"facts": facts, "versions": versions(), "files": files}, indent=1)


def problem(folder: Path, facts: Mapping[str, Any] | None = None, *, alone: bool = False) -> str | None:
    """Return why a folder is not what its manifest says, in a few words, or None if it is.

    Args:
        folder: the folder.
        facts: what the files have to be of, if that is known; the manifest must say the same.
        alone: whether files that the manifest lacks are a problem too.
    """
    if not folder.is_dir():
        return "it is missing"
    try:
        found = read_sealed(folder / NAME)
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError):
        return f"its {NAME} cannot be read"
    files, own = found["files"], found["facts"]
    # Tuples are lists in JSON.
    wanted = json.loads(json.dumps(facts))
    if facts is not None and own != wanted:
        return "it was saved with other " + " and ".join(name for name in wanted if own.get(name) != wanted[name])
    there = _files(folder)
    for name, expected in files.items():
        if name not in there:
            return f"{name} is missing"
        if describe(there[name]) != expected:
            return f"{name} was changed"
    others = sorted(there.keys() - files.keys())
    return f"{others[0]} does not belong to it" if alone and others else None


def facts(folder: Path) -> dict[str, Any]:
    """Return what a folder's manifest says that its files are of; nothing if it cannot be read."""
    try:
        found: dict[str, Any] = read_sealed(folder / NAME)["facts"]
    except (OSError, ValueError):
        return {}
    return found


def describe(path: Path) -> dict[str, Any]:
    """Return the size of a file in bytes and its SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _files(folder: Path) -> dict[str, Path]:
    """Return the regular files below a folder by their names there, but for those that are not listed."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in found.items() if name not in NOT_LISTED}
