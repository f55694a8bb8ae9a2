"""Hashes: of texts and files, which caches and results tell apart by them, and of the files of a saved folder.

A folder's manifest has the sizes and hashes of its files, what they are of, and a hash of itself. Without it, nothing
in the folder counts.
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

from .errors import InputError
from .files import check_regular, write_atomically
from .provenance import versions

NAME = "manifest.json"
NOT_LISTED = {NAME, "README.md", ".lock"}
"""Files that decide nothing, of which people may write a model card."""
HASH_KEY = "check"
"""The name of the hash of JSON in itself."""
MAX_NUMBER = 1e300
"""The largest number in JSON that a program of ours wrote; larger ones may overflow."""


def dump_with_hash(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON with a hash of itself, which :func:`load_with_hash` compares."""
    return json.dumps({**content, HASH_KEY: fingerprint([json.dumps(content)])}, indent=indent) + "\n"


def load_with_hash(text: str | bytes) -> dict[str, Any]:
    """Return the JSON that :func:`dump_with_hash` wrote.

    Raises:
        ValueError: if it is something else, or was changed.
    """
    try:
        content = json.loads(text)
        if content.pop(HASH_KEY) == fingerprint([json.dumps(content)]):
            return dict(content)
    except (KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError("it is not as it was written")


def matches_type(kind: Any, value: Any) -> bool:
    """Return whether a value of JSON is of a type, or has the fields of a dataclass with their types.

    A seal tells damage, but not who wrote a file. Tuples are lists, and of annotated types, the second one counts.
    """
    found, inner = get_origin(kind) or kind, get_args(kind) or (Any,)
    if found is Annotated:
        return matches_type(inner[1], value)
    if is_dataclass(found):
        types = get_type_hints(found, include_extras=True)
        needed = {each.name for each in fields(found) if each.default is each.default_factory is MISSING}
        known = isinstance(value, dict) and needed <= value.keys() <= types.keys()
        return known and all(matches_type(types[name], each) for name, each in value.items())
    if found in (Union, UnionType):
        return any(matches_type(each, value) for each in inner)
    if found is tuple and Ellipsis not in inner:
        return isinstance(value, list) and len(value) == len(inner) and all(map(matches_type, inner, value))
    if found in (list, tuple):
        return isinstance(value, list) and all(matches_type(inner[0], each) for each in value)
    if found is dict:
        return isinstance(value, dict) and all(matches_type(inner[-1], each) for each in value.values())
    if found in (int, float):
        return isinstance(value, int | found) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    if found is Literal:
        return value in inner
    return found is Any or isinstance(value, found)  # which raises a TypeError if it is not a type


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
    """Return a short hash of the bytes of files in their order, which are read once, about a gigabyte a second.

    Args:
        files: the files.
        names: what decides, besides their bytes, what is read, such as a column.
    """
    parts = [(file.suffix.lower(), _described(file)["sha256"]) for file in files]
    return fingerprint([*names, *(word for part in parts for word in part)])


def fingerprint_of_code(file: Path) -> str:
    """Return a short hash of a Python file, of what it imports from its folder, directly or not, and of its data.

    Its own name decides nothing. Of a package, all files count. Its data are the files and folders, relative to its
    folder, that it lists as ``depends = ("factor.json", ...)``, outside of functions. They are read without running it.

    Raises:
        InputError: if ``depends`` is something else, or lists a path where nothing is.
        SyntaxError: if the file is not Python.
    """
    file = file.resolve()
    waiting, found = {file}, set[Path]()
    while waiting:
        found.add(path := waiting.pop())
        if path.suffix != ".py":
            continue
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except SyntaxError:
            if path == file:
                raise
            continue  # it may be a template, which nobody imports
        if path == file:
            waiting |= _dependencies(file, tree)
        for node in ast.walk(tree):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for place in (file.parent / module.partition(".")[0] for module in modules):
                waiting |= {each for each in (place.with_suffix(".py"), *place.rglob("*.py")) if each.is_file()} - found
    others = sorted((os.path.relpath(path, file.parent), path) for path in found - {file})
    return fingerprint(word for name, path in [("", file), *others] for word in (name, _described(path)["sha256"]))


def _dependencies(file: Path, tree: ast.Module) -> set[Path]:
    """Return the files that a Python file names as its data."""
    files = set[Path]()
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["depends"]):
            continue
        try:
            names = ast.literal_eval(node.value)
        except ValueError:
            names = None
        if not (isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)):
            example = 'depends = ("factor.json",)'
            raise InputError(None, f"{file}, line {node.lineno}: expected names of files, written out as in {example}")
        for path in (file.parent / name for name in names):
            if not path.exists():
                raise InputError(None, f"{file}, line {node.lineno}: depends names {path}, which is not there")
            inside = [path] if path.is_file() else sorted(path.rglob("*"))
            files |= {child.resolve() for child in inside if child.is_file() and child.parent.name != "__pycache__"}
    return files - {file}


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files in a folder; ``facts`` says as JSON what they are of, such as the settings."""
    files = {name: _described(path) for name, path in _files(folder).items()}
    content = {"facts": facts, "versions": versions(), "files": files}
    write_atomically(folder / NAME, dump_with_hash(content, indent=1))


def read(folder: Path) -> dict[str, Any]:
    """Return what a folder's manifest says that its files are of.

    Raises:
        OSError: if the manifest can't be read.
        ValueError: if it is something else, or was changed.
    """
    facts: dict[str, Any] = _content(folder)["facts"]
    return facts


def version(folder: Path) -> str:
    """Return the version of this package that wrote a folder's manifest. It raises the errors of :func:`read`."""
    return str(_content(folder)["versions"].get("whereformer"))


def find_problem(folder: Path, facts: Mapping[str, Any] | None = None) -> str | None:
    """Return why a folder is not what its manifest says, in a few words, or None if it is.

    ``facts`` is what the files have to be of, if that is known; the manifest must say the same.
    """
    if not folder.is_dir():
        return "it is missing"
    try:
        found = _content(folder)
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError):
        return f"its {NAME} cannot be read"
    # Tuples are lists in JSON.
    wanted, there = json.loads(json.dumps(facts or {})), _files(folder)
    if others := [name for name in wanted if found["facts"].get(name) != wanted[name]]:
        return f"it was saved with other {' and '.join(others)}"
    for name, expected in found["files"].items():
        if name not in there:
            return f"{name} is missing"
        if _described(there[name]) != expected:
            return f"{name} was changed"
    return None


def _content(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    if path.exists():
        check_regular(None, path)
    content = load_with_hash(path.read_bytes())
    if not all(isinstance(content.get(part), dict) for part in ("facts", "versions", "files")):
        raise ValueError("it is no manifest")
    return content


def _described(path: Path) -> dict[str, Any]:
    """Return the size of a file in bytes and its SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _files(folder: Path) -> dict[str, Path]:
    """Return the regular files below a folder by their names there, but for those that are not listed."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in found.items() if name not in NOT_LISTED}
