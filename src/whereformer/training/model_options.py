"""Which setting an error of a model is about, and how large models are."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from ..errors import InputError
from ..positions import Position, describe


def check_position_options(position: str, options: Mapping[str, Any]) -> None:
    """Raise unless values are of the same kind as the defaults of a position method's options.

    Raises:
        InputError: for one that is not, or an unknown method.
    """
    defaults = {name: value for part in position.split("+") for name, value in describe(part.strip())[1].items()}
    for name, value in options.items():
        # Building the method refuses options that it does not have.
        default = defaults.get(name)
        kinds = (float, int) if type(default) is float else (type(default),)
        if default is not None and type(value) not in kinds:
            reason = f"{name}: expected a value as {json.dumps(default)}, got {json.dumps(value)}"
            raise InputError("position_options", reason)


def as_setting(error: Exception, settings: Container[str], options: Container[str] = ()) -> InputError:
    """An error of a configuration, a position method or a model, as one about a setting of an experiment.

    Args:
        error: what was raised.
        settings: names of settings; an error about anything else is about the position method.
        options: the position method's options, which are in the setting ``position_options``.
    """
    field = error.field if isinstance(error, InputError) else None
    # Methods raise a TypeError for options that they do not have.
    if isinstance(error, TypeError) or field in options:
        return InputError("position_options", str(error))
    if isinstance(error, InputError) and field in settings:
        return error
    return about_method(error, "position")


def about_method(error: Exception, field: str) -> InputError:
    """A position method's error, as one about the setting ``field`` that names the method."""
    if isinstance(error, InputError) and error.field == "position":
        return InputError(field, error.reason)
    return InputError(field, str(error))


def parameters(model: nn.Module) -> dict[str, int]:
    """Parameters of a model, in all and of position."""
    positional = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if isinstance(module, Position)
        for parameter in module.parameters()
    }
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positional_parameters": sum(positional.values()),
    }
