"""Hashes that identify texts and files, and the manifests of saved folders.

A folder's manifest has the sizes and hashes of its files, facts about their content, and a hash of itself. A folder
without a valid manifest is ignored.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os.path
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .files import check_regular, write_atomically
from .provenance import versions

NAME = "manifest.json"
IGNORED = {NAME, "README.md", ".lock"}
"""Files that the manifest ignores; users may add a model card."""
OTHER_WORDS = {"what": "settings"}
"""Plainer words for facts in messages. Their names in saved folders stay, so that older ones fit."""
HASH_KEY = "check"
"""The key of the hash that JSON contains of itself."""
MAX_NUMBER = 1e300
"""The largest number in JSON that this package wrote; larger ones may overflow."""


def dump_with_hash(content: Mapping[str, object], indent: int | None = None) -> str:
    """Return JSON that contains its own hash, for :func:`load_with_hash` to check."""
    return json.dumps({**content, HASH_KEY: fingerprint([json.dumps(content)])}, indent=indent) + "\n"


def load_with_hash(text: str | bytes) -> dict[str, Any]:
    """Return the JSON that :func:`dump_with_hash` wrote.

    Raises:
        ValueError: if it is not such JSON, or was changed.
    """
    try:
        content = json.loads(text)
        if content.pop(HASH_KEY) == fingerprint([json.dumps(content)]):
            return dict(content)
    except (KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError("its checksum does not match")


def matches_type(kind: Any, value: Any) -> bool:
    """Return whether a value from JSON has a type; for a dataclass, whether it has its fields with their types.

    A hash shows damage, but not who wrote a file. Tuples are lists, and of annotated types, the second one counts.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind) or (Any,)
    if origin is Annotated:
        return matches_type(inner[1], value)
    if is_dataclass(origin):
        types = get_type_hints(origin, include_extras=True)
        needed = {field.name for field in fields(origin) if field.default is field.default_factory is MISSING}
        known = isinstance(value, dict) and needed <= value.keys() <= types.keys()
        return known and all(matches_type(types[name], item) for name, item in value.items())
    if origin in (Union, UnionType):
        return any(matches_type(option, value) for option in inner)
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, list) and len(value) == len(inner) and all(map(matches_type, inner, value))
    if origin in (list, tuple):
        return isinstance(value, list) and all(matches_type(inner[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(matches_type(inner[-1], item) for item in value.values())
    if origin in (int, float):
        return isinstance(value, int | origin) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    if origin is Literal:
        return value in inner
    return origin is Any or isinstance(value, origin)  # a TypeError if ``kind`` is not a type


def fingerprint(texts: Iterable[str]) -> str:
    """Return a short hash of texts in their order.

    Each text is followed by its length in bytes, so that no character can stand for the end of one.
    """
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(data)
        digest.update(len(data).to_bytes(8, "little"))
    return digest.hexdigest()[:16]


def fingerprint_of_files(files: Sequence[Path], names: Iterable[str] = ()) -> str:
    """Return a short hash of the bytes of files in their order. They are read once, about a gigabyte a second.

    ``names`` are settings that, besides the bytes, decide the content, such as a column.
    """
    parts = [(file.suffix.lower(), _describe(file)["sha256"]) for file in files]
    return fingerprint([*names, *(word for part in parts for word in part)])


def fingerprint_of_code(file: Path) -> str:
    """Return a short hash of a Python file and of all files that it imports from its folder.

    The file's name does not matter. All files of a package count. The file is not run.

    Raises:
        SyntaxError: if the file is not Python.
    """
    file = file.resolve()
    waiting, visited = {file}, set[Path]()
    while waiting:
        visited.add(path := waiting.pop())
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except SyntaxError:
            if path == file:
                raise
            continue  # it may be a template that is never imported
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for base in (file.parent / module.partition(".")[0] for module in modules):
                sources = {source for source in (base.with_suffix(".py"), *base.rglob("*.py")) if source.is_file()}
                waiting |= sources - visited
    imported = sorted((os.path.relpath(path, file.parent), path) for path in visited - {file})
    return fingerprint(word for name, path in [("", file), *imported] for word in (name, _describe(path)["sha256"]))


def write(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the manifest of all files in a folder; ``facts`` describes their content as JSON, such as the settings."""
    files = {name: _describe(path) for name, path in _files(folder).items()}
    content = {"facts": facts, "versions": versions(), "files": files}
    write_atomically(folder / NAME, dump_with_hash(content, indent=1))


def read(folder: Path) -> dict[str, Any]:
    """Return the facts in a folder's manifest about the content of its files.

    Raises:
        OSError: if the manifest can't be read.
        ValueError: if it is not a manifest, or was changed.
    """
    return _content(folder)["facts"]


def version(folder: Path) -> str:
    """Return the version of this package that wrote a folder's manifest. It raises the errors of :func:`read`."""
    return str(_content(folder)["versions"].get("whereformer"))


def find_problem(folder: Path, facts: Mapping[str, object] | None = None) -> str | None:
    """Return in a few words how a folder differs from its manifest; None if all of the manifest's files are unchanged.

    ``facts`` are the expected facts about the files; the manifest must have these. Its other facts, and other files in
    the folder, do not matter.
    """
    if not folder.is_dir():
        return "it is missing"
    try:
        content = _content(folder)
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError):
        return f"its {NAME} cannot be read"
    # Tuples are lists in JSON.
    expected_facts, paths = json.loads(json.dumps(facts or {})), _files(folder)
    differing = [name for name, fact in expected_facts.items() if content["facts"].get(name) != fact]
    if names := [OTHER_WORDS.get(name, name) for name in differing]:
        return f"it was saved with different {' and '.join(names)}"
    for name, expected in content["files"].items():
        if name not in paths:
            return f"{name} is missing"
        if _describe(paths[name]) != expected:
            return f"{name} was changed"
    return None


def _content(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    if path.exists():
        check_regular(None, path)
    content = load_with_hash(path.read_bytes())
    if not all(isinstance(content.get(part), dict) for part in ("facts", "versions", "files")):
        raise ValueError("it is not a manifest")
    return content


def _describe(path: Path) -> dict[str, Any]:
    """Return the size of a file in bytes and its SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _files(folder: Path) -> dict[str, Path]:
    """Return the regular files below a folder by their names there, without the names in :data:`IGNORED`."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in paths.items() if name not in IGNORED}
