"""``trial`` gives a copy of a model to run, so that the model itself stays as it is; what a model is made of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import InputError


@contextmanager
def trial(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Return a copy of a model with the same weights in the same memory, to run for evaluation without gradients.

    Some models change when they run: BigBird-Pegasus replaces its sparse attention when it reads a short text. Hooks,
    buffers and configurations are copies, too, so the caller may change them. Random numbers stay as they are.
    """
    for name, module in model.named_modules():
        # A function that stands for a forward would run the module itself, not its copy.
        if isinstance(vars(module).get("forward"), FunctionType):
            told = f"the forward of {name or type(model).__name__} was replaced by a function"
            raise InputError("model", f"{told}, which a copy of the model would share; attach first, and wrap it then")
    weights: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            copied = copy.deepcopy(model, weights)
        except (RuntimeError, TypeError) as error:
            raise InputError("model", f"it cannot be copied, as attach tries it ({error})") from error
        yield copied.eval()


def twins(one: nn.Module, other: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the module of a copy for each module of a model, or the other way round; before either of them runs."""
    return dict(zip(one.modules(), other.modules(), strict=True))


def parts_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return a model and the models inside, such as its encoder."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def owners_of(model: PreTrainedModel) -> dict[nn.Module, PreTrainedModel]:
    """Return the innermost model around each module."""
    return {module: part for part in parts_of(model) for module in part.modules()}


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configurations of a model's modules and those inside them, each once."""
    found: dict[int, PreTrainedConfig] = {}

    def visit(value: Any) -> None:
        if isinstance(value, PreTrainedConfig) and id(value) not in found:
            found[id(value)] = value
            for inner in vars(value).values():
                visit(inner)

    for module in model.modules():
        for value in vars(module).values():
            visit(value)
    return list(found.values())
