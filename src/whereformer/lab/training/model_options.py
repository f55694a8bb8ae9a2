"""Check position options, turn model errors into errors about settings, and count parameters."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from ...errors import InputError
from ...positions import Position, describe, method_names


def check_position_options(position: str, options: Mapping[str, Any]) -> None:
    """Check that each option's value has the same type as the position method's default.

    Raises:
        InputError: if a value has another type, or the method is unknown.
    """
    of_method = {part: describe(part)[1] for part in method_names(position)}
    defaults = {name: value for own in of_method.values() for name, value in own.items()}
    # A method's own options may stand under its name.
    nested = {part: own for part, own in options.items() if part in of_method and isinstance(own, dict)}
    given = [(name, value, name) for name, value in options.items()]
    given += [(name, value, f"{part}: {name}") for part, own in nested.items() for name, value in own.items()]
    for name, value, where in given:
        # Options that the method does not have are refused when it is built.
        default = defaults.get(name)
        kinds = (float, int) if type(default) is float else (type(default),)
        # A list has a number per layer. A method that takes one number refuses it when it is built.
        values = value if type(value) is list and value else [value]
        if default is not None and any(type(each) not in kinds for each in values):
            expected = f"{where}: expected a value like {json.dumps(default)}"
            raise InputError("position_options", f"{expected}, got {json.dumps(value)}")


def as_setting(error: Exception, settings: Container[str], options: Container[str] = ()) -> InputError:
    """Turn an error of a configuration or model into one about a setting, or else about the position method.

    Args:
        error: the error that was raised.
        settings: names of the settings.
        options: names of the position method's options, which the setting ``position_options`` holds.
    """
    field = error.field if isinstance(error, InputError) else None
    # A method raises a TypeError for an option that it does not have.
    if isinstance(error, TypeError) or field in options:
        return InputError("position_options", str(error))
    if isinstance(error, InputError) and field in settings:
        return error
    return about_method(error, "position")


def about_method(error: Exception, field: str) -> InputError:
    """Turn a position method's error into one about ``field``, the setting that names the method."""
    if isinstance(error, InputError) and error.field == "position":
        return InputError(field, error.reason)
    return InputError(field, str(error))


def parameters(model: nn.Module) -> dict[str, int]:
    """Count a model's parameters: all of them, and those of its position methods."""
    methods = nn.ModuleList(module for module in model.modules() if isinstance(module, Position))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positional_parameters": sum(parameter.numel() for parameter in methods.parameters()),
    }
