"""The manifest of a saved folder: its files with sizes and hashes, and what they are of. Without it, nothing counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..json_files import read_json, write_json
from ..provenance import versions

NAME = "manifest.json"
FORMAT = 1
FOR_PEOPLE = {"README.md"}
"""Files that people may edit, and that decide nothing."""


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files in a folder; ``facts`` says as JSON what they are of, such as the settings."""
    files = {name: describe(path) for name, path in _files(folder).items()}
    write_json(folder / NAME, {"format": FORMAT, "facts": facts, "versions": versions(), "files": files}, indent=1)


def problem(folder: Path, facts: Mapping[str, Any], *, alone: bool = False) -> str | None:
    """Return why a folder is not what its manifest says, in a few words, or None if it is.

    Args:
        folder: the folder.
        facts: what the files have to be of; the manifest must say the same.
        alone: whether files that the manifest lacks are a problem too.
    """
    if not folder.is_dir() or folder.is_symlink():
        return "it is missing" if not folder.exists() else "it is not a folder"
    try:
        found = read_json(folder / NAME)
    except FileNotFoundError:
        return "it has no manifest, as if an earlier version had written it"
    except (OSError, ValueError):
        return f"its {NAME} cannot be read"
    files = found.get("files")
    if found.get("format") != FORMAT or not isinstance(files, dict):
        return f"its {NAME} is of another version"
    # Tuples are lists in JSON.
    wanted = json.loads(json.dumps(facts))
    if (own := found.get("facts")) != wanted:
        own = own if isinstance(own, dict) else {}
        names = sorted(name for name in {*own, *wanted} if own.get(name) != wanted.get(name))
        return f"it was saved with other {' and '.join(names) or 'facts'}"
    there = _files(folder)
    for name, expected in files.items():
        if name not in there:
            return f"{name} is missing"
        path = there[name]
        if path.is_symlink() or not path.is_file() or describe(path) != expected:
            return f"{name} was changed"
    others = sorted(there.keys() - files.keys())
    return f"{others[0]} does not belong to it" if alone and others else None


def facts(folder: Path) -> dict[str, Any]:
    """Return what a folder's manifest says that its files are of; nothing if it cannot be read."""
    try:
        found = read_json(folder / NAME).get("facts")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe(path: Path) -> dict[str, Any]:
    """Return the size of a file in bytes and its SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _files(folder: Path) -> dict[str, Path]:
    """Return what is below a folder, by its names there: all but folders, the manifest and what people may edit."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    found = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in found.items() if name not in {NAME, *FOR_PEOPLE}}
