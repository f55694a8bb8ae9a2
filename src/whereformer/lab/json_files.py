"""JSON files: written whole or not at all, and sealed by a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import check_regular, write_atomically

SEAL = "sha256"
"""The name of the hash in a JSON file."""


def write_json(path: Path, content: Mapping[str, Any], indent: int | None = None, *, finite: bool = True) -> None:
    """Write a JSON file, completely or not at all.

    Raises:
        ValueError: if a number is not ``finite``, as all have to be in JSON that others read.
    """
    write_atomically(path, json.dumps(content, indent=indent, allow_nan=not finite) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: if the file can't be read.
        ValueError: if it is not a regular file, not JSON, or not an object.
    """
    if path.exists():
        check_regular(None, path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("lists within lists without end") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    return found


def write_sealed(path: Path, content: Mapping[str, Any], indent: int | None = None, *, finite: bool = True) -> None:
    """Write a JSON file as :func:`write_json` does, with a hash of its content at the end, which tells damage."""
    write_json(path, {**content, SEAL: _hash(content)}, indent, finite=finite)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what :func:`write_sealed` wrote.

    Raises:
        OSError: if the file can't be read.
        ValueError: if it is something else, or was changed.
    """
    content = read_json(path)
    if content.pop(SEAL, None) != _hash(content):
        raise ValueError("it is not as it was written")
    return content


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
