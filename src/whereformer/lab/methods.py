"""The position methods that a command names, some of them from a user's plugin, and errors about them.

Importing this module is fast, so that a misspelled name is refused at once.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..files import check_regular
from ..manifest import fingerprint_of_code
from ..positions import METHODS, build_position, canonical_name, component_names, method_class, position_names
from ..positions.base import position_parameters

PLUGIN = "whereformer_plugin_"
"""How the names of plugins' modules begin; their version follows."""


def resolve_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Return the canonical names of distinct methods, as :func:`config_fields` reads them; ("all",) is all methods.

    An unknown method raises an InputError for ``positions``.
    """
    names = position_names() if list(names) == ["all"] else names
    try:
        chosen = tuple(dict.fromkeys(canonical_name("".join(name.split())) for name in names))
        for name in chosen:
            for part in component_names(config_fields(name)["position"]):
                method_class(part)
    except InputError as error:
        rows = "; rows may also be hybrid or METHOD+sinks" if error.reason.startswith("unknown") else ""
        raise InputError("positions", f"{error.reason}{rows}") from None
    return chosen


def config_fields(name: str, blocks: str = "4", decoder_layers: str = "0") -> dict[str, Any]:
    """Return the config fields that distinguish the row with this name, for an encoder with these layers.

    Besides the name of a position method, it may be "rope+sinks", which has sinks too, or "hybrid", which has the
    positions and windows of this preset.
    """
    position = name if "sinks" in METHODS else name.removesuffix("+sinks")
    if position != name and "/" in position:
        raise InputError("position", f"all layers would have sinks, not only the last one, got {name!r}")
    fields: dict[str, Any] = {"position": position}
    if position == "hybrid" and position not in METHODS:
        from ..models.config import preset_fields

        preset = preset_fields(position, {"blocks": blocks, "decoder_layers": decoder_layers})
        fields = {field: preset[field] for field in ("position", "windows")}
    return fields if position == name else {**fields, "sinks": True}


def check_methods(names: Iterable[str], /, **sizes: int) -> None:
    """Build each method once on the meta device, where tables take no memory, so that errors appear before training.

    ``sizes`` are arguments of :func:`whereformer.build_position`. A method that does not fit them raises an InputError
    for ``positions``.
    """
    for name in names:
        try:
            with torch.device("meta"):
                build_position(config_fields(name, str(sizes.get("num_layers", 1)))["position"], **sizes)
        except (ValueError, TypeError) as error:
            reason = as_method_error(error).reason
            raise InputError("positions", reason if name in reason else f"{name!r} does not fit: {reason}") from None


def as_method_error(error: Exception) -> InputError:
    """Turn a position method's error into one about ``position``."""
    if isinstance(error, InputError) and error.field == "position":
        return error
    return InputError("position", str(error))


def as_setting(error: Exception, settings: Container[str], options: Container[str] = ()) -> InputError:
    """Turn an error of a configuration or model into one about a setting, or else about the position method.

    ``options`` are the names of the position method's options, which the setting ``position_options`` holds.
    """
    field = error.field if isinstance(error, InputError) else None
    # A method raises a TypeError for an option that it does not have.
    if isinstance(error, TypeError) or field in options:
        return InputError("position_options", str(error))
    if isinstance(error, InputError) and field in settings:
        return error
    return as_method_error(error)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Count a model's parameters: all of them, and the positional ones."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positional_parameters": sum(parameter.numel() for parameter in position_parameters(model).values()),
    }


def load_plugin(path: Path | None) -> None:
    """Run a Python file that registers position methods, unless this process has done so; None does nothing.

    The file can import files in its folder, like a script.

    Raises:
        InputError: for ``plugin``, if it is not a Python file, or registers no method or a name that is taken. Other
            errors in the file are raised unchanged.
    """
    if path is None:
        return
    check_regular("plugin", path)
    path = path.resolve()
    if path.suffix != ".py":
        raise InputError("plugin", f"expected a Python file, got {str(path)!r}")
    name = f"{PLUGIN}{fingerprint_of_code(path)}"
    if name in sys.modules:
        return
    spec: Any = spec_from_file_location(name, path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    before, module = set(METHODS), module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses find it
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, InputError):  # such as a name that is taken
            raise InputError("plugin", f"{path.name}: {error}") from None
        raise
    if METHODS.keys() == before:
        del sys.modules[name]
        raise InputError("plugin", f"{path.name} registers no method; it must call whereformer.positions.register")
