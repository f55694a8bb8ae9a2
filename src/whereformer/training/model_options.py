"""What configurations refuse, said by the option of the command that it is about; and how large models are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import InputError
from ..positions import Position, describe


def check_position_options(position: str, options: Mapping[str, Any], option: str = "position-options") -> None:
    """Raise unless values are of the same kind as the defaults of a position method's options.

    Raises:
        InputError: naming the option.
        ValueError: for an unknown method.
    """
    defaults = {name: value for part in position.split("+") for name, value in describe(part.strip())[1].items()}
    for name, value in options.items():
        # One that the method doesn't have is told when it is built.
        default = defaults.get(name)
        kinds = (float, int) if type(default) is float else (type(default),)
        if default is not None and type(value) not in kinds:
            raise InputError(f"--{option}: {name}: expected a value as {json.dumps(default)}, got {json.dumps(value)}")


def named(error: Exception, config: type, names: Mapping[str, str], options: Iterable[str] = ()) -> InputError:
    """The same error by the option of the command that it is about.

    Args:
        error: of a configuration, a position method or a model.
        config: the configuration's class.
        names: what fields are called on the command line, where that differs.
        options: those of the position method.
    """
    field, _, rest = str(error).partition(": ")
    if isinstance(error, TypeError) or not set(field.split()).isdisjoint(options):
        return InputError(f"--position-options: {error}")
    if field in config.__dataclass_fields__:  # type: ignore[attr-defined]  # transformers makes it one
        return InputError(f"--{names.get(field, field.replace('_', '-'))}: {rest}")
    return InputError(f"--position: {error}")


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
