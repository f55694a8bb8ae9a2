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
    """Write the manifest of all files that are in a folder.

    Args:
        folder: the folder, whose files are complete.
        facts: what the files are of, such as the settings and the step; as JSON.
    """
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
    except (OSError, ValueError, RecursionError):
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
    return _problem_of_files(folder, files, alone)


def describe(path: Path) -> dict[str, Any]:
    """Return the size of a file in bytes and its SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _problem_of_files(folder: Path, files: Mapping[str, Any], alone: bool) -> str | None:
    there = _files(folder)
    for name, expected in files.items():
        if name not in there:
            return f"{name} is missing"
        if there[name].is_symlink() or not there[name].is_file():
            return f"{name} is not a file"
        try:
            own = describe(there[name])
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        if own != expected:
            size = expected.get("size") if isinstance(expected, dict) else None
            return (
                f"{name} has {own['size']:,} bytes, not {size:,}"
                if own["size"] != size and isinstance(size, int)
                else f"{name} was changed"
            )
    if alone and (others := sorted(there.keys() - files.keys())):
        return f"{others[0]} does not belong to it"
    return None


def _files(folder: Path) -> dict[str, Path]:
    """Return the files below a folder that a manifest describes, by their names in the folder."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: path
        for name, path in found.items()
        if name != NAME and name not in FOR_PEOPLE and (path.is_symlink() or not path.is_dir())
    }
