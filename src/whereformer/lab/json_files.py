"""JSON files: written whole or not at all, sealed by a hash, and read into dataclasses with their types checked."""

from __future__ import annotations

import hashlib
import json
import re
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import shown
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


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with a hash of it at the end.

    Raises:
        ValueError: if a number is not finite.
    """
    return {**content, SEAL: hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()}


def check_seal(content: Mapping[str, Any]) -> None:
    """Check the hash in the content of a JSON file; files of earlier versions have none.

    Raises:
        ValueError: if the content is not what was sealed.
    """
    if SEAL in content and content[SEAL] != sealed({name: content[name] for name in content if name != SEAL})[SEAL]:
        raise ValueError("it was changed after it was written")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: if the file can't be read.
        ValueError: if it is not a regular file, not JSON, or not an object.
    """
    if path.exists():
        check_regular(None, path)
    try:
        found = json.loads(
            path.read_text(encoding="utf-8"), parse_int=_int, parse_float=_float, parse_constant=_no_number
        )
    except RecursionError:
        raise ValueError("lists within lists without end") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    return found


MOST = 2**53
"""The largest whole number in a file. Beyond it, JSON of other programs is not exact."""
LARGEST = 1e100
"""The largest number in a file, whose square is still a number."""


def _int(text: str) -> int:
    # Python does not read thousands of digits, and says so in an error of another kind.
    if len(text) > 20 or abs(int(text)) > MOST:
        raise ValueError(f"expected whole numbers of at most {MOST}, got {text[:20]}...")
    return int(text)


def _float(text: str) -> float:
    if not abs(float(text)) <= LARGEST:
        raise ValueError(f"expected numbers of at most {LARGEST:g}, got {text:.20}")
    return float(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def check_that(holds: bool, where: str, expected: str) -> None:
    """Raise a ValueError that names a place in a file unless what is expected holds there."""
    if not holds:
        raise ValueError(f"{where}: expected {expected}")


def check_heads(where: str, heads: Sequence[Sequence[Sequence[float]] | None]) -> None:
    """Check numbers for offsets, [layer][head][offset]: the same odd number for every head of a layer.

    Raises:
        ValueError: if they are not; the message names the place.
    """
    for number, layer in enumerate(heads):
        if layer is not None:
            lengths = {len(head) for head in layer}
            check_that(
                len(lengths) == 1 and min(lengths) % 2 == 1,
                f"{where}[{number}]",
                "the same odd number of offsets for every head",
            )


def from_json(kind: type[Record], value: Any, where: str = "") -> Record:
    """Build a dataclass from a value in a JSON file.

    Another version may have written the file: missing fields take their defaults, and unknown entries are dropped.

    Args:
        kind: the dataclass.
        value: the value from the JSON file.
        where: its place in the file, for the error message.
    Raises:
        ValueError: if a field without default is missing, or a value has the wrong type; the message names the place.
    """
    check_that(isinstance(value, dict), where or "the file", f"an object, got {shown(value)}")
    found = {}
    hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    for each in fields(kind):  # type: ignore[arg-type]  # a dataclass
        place = f"{where}.{each.name}" if where else each.name
        if each.name in value:
            found[each.name] = _parsed(hints[each.name], value[each.name], place)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{place}: missing")
    return kind(**found)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _parsed(hint: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to the type ``hint``: a dataclass, a container, a union or a plain type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        *others, last = (each for each in arguments if each is not type(None))
        for other in others:
            with suppress(ValueError):
                return _parsed(other, value, where)
        return _parsed(last, value, where)
    if is_dataclass(hint):
        return from_json(hint, value, where)  # type: ignore[arg-type]  # a class
    if origin in (dict, Mapping) and isinstance(value, dict):
        of_key, of_value = arguments
        return {_key(of_key, key, where): _parsed(of_value, each, f"{where}.{key}") for key, each in value.items()}
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        fixed = origin is tuple and arguments[1:] != (...,)
        kinds = arguments if fixed else arguments[:1] * len(value)
        if len(kinds) == len(value):
            parts = zip(kinds, value, strict=True)
            found = [_parsed(kind, each, f"{where}[{index}]") for index, (kind, each) in enumerate(parts)]
            return tuple(found) if origin is tuple else found
    if origin is Literal and value in arguments:
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint is int and type(value) is int and value < 0:
        raise ValueError(f"{where}: expected at least 0, got {value}")
    if origin is None and type(value) is hint:
        return value
    raise ValueError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {shown(value)}")


def _key(hint: Any, key: str, where: str) -> Any:
    """Convert the key of a JSON object, which is always text, to the type ``hint``."""
    if hint is not int:
        return key
    if not re.fullmatch("[0-9]{1,15}", key):
        raise ValueError(f"{where}: expected whole numbers as keys, got {shown(key)}")
    return int(key)
