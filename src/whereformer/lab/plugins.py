"""Plugins: files of the user's own that register position methods, for commands that know methods by name."""

from __future__ import annotations

import hashlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from ..errors import InputError
from ..files import check_regular
from ..positions import METHODS


def load_plugin(path: Path | None) -> None:
    """Run a Python file that registers position methods, unless this process has done so; None does nothing.

    Raises:
        InputError: for ``plugin``, if it is no Python file, fails, or registers no method or a name that is taken.
    """
    if path is None:
        return
    check_regular("plugin", path)
    path = path.resolve()
    name = f"whereformer_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("plugin", f"expected a Python file, got {str(path)!r}")
    before, module = dict(METHODS), module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses find it
    try:
        spec.loader.exec_module(module)
        if METHODS.keys() == before.keys():
            raise InputError("plugin", f"{path.name} registers no method; call whereformer.positions.register in it")
    except BaseException as error:
        del sys.modules[name]
        METHODS.clear()
        METHODS.update(before)
        if isinstance(error, InputError) and error.field == "plugin":
            raise
        if not isinstance(error, Exception):
            raise
        told = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError("plugin", f"{path.name} fails: {told}") from None
