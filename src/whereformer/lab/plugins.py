"""Plugins: files of the user's own that register position methods, for commands that know methods by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from ..errors import InputError
from ..files import check_regular
from ..positions import METHODS, method_names
from .manifest import fingerprint_of_files

_SOURCES: dict[str, str] = {}
"""The hash of the files that each method comes from which is not the library's."""


def load_plugin(path: Path | None) -> None:
    """Run a Python file that registers position methods, unless this process has done so; None does nothing.

    Raises:
        InputError: for ``plugin``, if it is no Python file, or registers no method or a name that is taken. Others
            errors of the file are raised as they are.
    """
    if path is None:
        return
    check_regular("plugin", path)
    path = path.resolve()
    source = fingerprint_of_files([path])
    name = f"whereformer_plugin_{source}"
    if name in sys.modules:
        return
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("plugin", f"expected a Python file, got {str(path)!r}")
    before, imported, module = set(METHODS), set(sys.modules), module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses find it
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, InputError):  # such as a name that is taken
            raise InputError("plugin", f"{path.name}: {error}") from None
        raise
    if METHODS.keys() == before:
        raise InputError("plugin", f"{path.name} registers no method; call whereformer.positions.register in it")
    beside = [Path(getattr(sys.modules[each], "__file__", None) or "/") for each in sys.modules.keys() - imported]
    own = [
        file for file in beside if path.parent in file.parents and "site-packages" not in file.parts and file != path
    ]
    _SOURCES.update(dict.fromkeys(METHODS.keys() - before, fingerprint_of_files([path, *sorted(own)])))


def sources_of(names: Iterable[str]) -> dict[str, str]:
    """Return, for each of these methods that is made of a plugin's, a hash of the plugins' files."""
    parts = {name: [_SOURCES[part] for part in method_names(name) if part in _SOURCES] for name in names}
    return {name: ",".join(sources) for name, sources in parts.items() if sources}
