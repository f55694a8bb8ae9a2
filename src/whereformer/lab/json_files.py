"""JSON files: written whole or not at all, sealed by a hash, and read into dataclasses."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..files import check_regular, write_atomically

Record = TypeVar("Record")

SEAL = "sha256"
"""The name of the hash in a JSON file."""


def write_json(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON file, completely or not at all.

    Raises:
        ValueError: if a number is not finite, which JSON cannot express.
    """
    write_atomically(path, json.dumps(content, indent=indent, allow_nan=False) + "\n")


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


def write_sealed(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON file as :func:`write_json` does, with a hash of its content at the end, which tells damage."""
    write_json(path, {**content, SEAL: _hash(content)}, indent)


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


def from_json(kind: type[Record], value: Mapping[str, Any]) -> Record:
    """Build a dataclass from what was written of it. The hash of its file tells damage, so types are not checked.

    Missing fields take their defaults, and unknown entries are dropped.
    """
    hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    return kind(**{name: _made(hint, value[name]) for name, hint in hints.items() if name in value})


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; another type has none."""
    if not is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _made(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``hint``: keys to numbers, lists to tuples, objects to dataclasses."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if each is not type(None)]
        # Of several dataclasses, the one that has all entries.
        kinds = [each for each in kinds if isinstance(value, dict) and value.keys() <= _hints(each).keys()] or kinds
        return None if value is None else _made(kinds[0], value)
    if is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]  # a class
    if origin in (dict, Mapping):
        return {(int(key) if arguments[0] is int else key): _made(arguments[1], each) for key, each in value.items()}
    if origin in (list, Sequence):
        return [_made(arguments[0], each) for each in value]
    if origin is tuple:
        return tuple(map(_made, arguments[:1] * len(value) if arguments[1:] == (...,) else arguments, value))
    return value
