"""Turn model errors into errors about settings, and count parameters."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from ...errors import InputError
from ...positions import Position
from ..methods import about_method


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


def parameters(model: nn.Module) -> dict[str, int]:
    """Count a model's parameters: all of them, and those of its position methods."""
    methods = nn.ModuleList(module for module in model.modules() if isinstance(module, Position))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positional_parameters": sum(parameter.numel() for parameter in methods.parameters()),
    }
