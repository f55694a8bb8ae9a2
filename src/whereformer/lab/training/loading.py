"""Check that a checkpoint can be loaded, before training begins: its manifest only says that nobody changed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState

from ...errors import one_line

LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The parts of an optimizer's state that have the shape of their parameter."""


def loading_problem(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> str | None:
    """Return which file of a checkpoint does not load into a model and its optimizer, and why, or None if all do."""
    checks: dict[str, Callable[[Path], object]] = {
        "trainer_state.json": lambda file: TrainerState.load_from_json(str(file)),
        "model.safetensors": lambda file: _check_weights(file, model),
        "optimizer.pt": lambda file: _check_optimizer(file, optimizer),
        "scheduler.pt": lambda file: torch.load(file, map_location="cpu", weights_only=True),
    }
    for name, check in checks.items():
        if not (checkpoint / name).exists():
            continue  # such as the one file of weights that are in several; the manifest says what has to be there
        try:
            check(checkpoint / name)
        except Exception as error:  # whatever a file holds, an older checkpoint may be whole
            return f"{name} cannot be loaded ({one_line(str(error))[:200] or type(error).__name__})"
    return None


def _check_weights(file: Path, model: nn.Module) -> None:
    expected = model.state_dict()
    with safe_open(file, "pt") as found:
        for name in found.keys():  # noqa: SIM118  # it is no dict
            shape = tuple(found.get_slice(name).get_shape())
            if name not in expected or shape != tuple(expected[name].shape):
                raise ValueError(f"{name} {shape} is not the model's")


def _check_optimizer(file: Path, optimizer: Optimizer) -> None:
    found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    sizes = [len(group["params"]) for group in found["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        raise ValueError(f"it is of {sum(sizes)} parameters in {len(sizes)} groups, not the model's")
    numbers = (number for group in found["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        for name in LIKE_PARAMETERS:
            state = found["state"].get(number, {}).get(name)
            if state is not None and state.shape != parameter.shape:
                raise ValueError(f"{name} of parameter {number} has shape {tuple(state.shape)}, not the parameter's")
