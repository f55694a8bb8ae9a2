"""Check that a checkpoint can be loaded, before training begins: its manifest only says that nobody changed it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from ...errors import one_line
from ..json_files import from_json, read_json

ADAM, MUON = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)
"""What Adam's variants and Muon keep of a parameter: tensors of its shape, and the number of steps."""


def loading_problem(
    checkpoint: Path, step: int, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler
) -> str | None:
    """Return which file of a checkpoint does not load, and why, or None if all do.

    Args:
        checkpoint: its folder.
        step: the steps that were taken before it.
        model: the model that is to go on. It stays as it is.
        optimizer, schedule: fresh ones of that model, which are of no use afterwards.
    """
    weights, random_states = checkpoint / "model.safetensors", sorted(checkpoint.glob("rng_state*.pth"))
    return (
        file_problem(checkpoint / "trainer_state.json", lambda file: _check_log(file, step))
        # Large weights are in several files; the manifest says what has to be there.
        or (weights_problem(weights, model) if weights.exists() else None)
        or optimizer_problem(checkpoint / "optimizer.pt", optimizer)
        or file_problem(checkpoint / "scheduler.pt", lambda file: _check_schedule(file, schedule, step))
        or next(filter(None, (file_problem(file, _check_random_state) for file in random_states)), None)
    )


def weights_problem(file: Path, model: nn.Module) -> str | None:
    """Return why a file of weights does not load into a model, or None if it does."""
    return file_problem(file, lambda file: _check_weights(file, model))


def optimizer_problem(file: Path, fresh: Optimizer) -> str | None:
    """Return why a file does not load into an optimizer, or None if it does. ``fresh`` is of no use afterwards."""
    return file_problem(file, lambda file: _check_optimizer(file, fresh))


def file_problem(file: Path, check: Callable[[Path], object]) -> str | None:
    """Return what a check raises for a file, after the file's name, or None if it raises nothing."""
    try:
        check(file)
    except Exception as error:  # whatever a file holds, an older checkpoint may be whole
        return f"{file.name} cannot be loaded ({one_line(str(error))[:200] or type(error).__name__})"
    return None


def _check_weights(file: Path, model: nn.Module) -> None:
    expected, there = model.state_dict(), set()
    with safe_open(file, "pt") as found:
        for name in found.keys():  # noqa: SIM118  # it is no dict
            _check_like(found.get_tensor(name), expected.get(name), name)
            there.add(expected[name].data_ptr())
    # Tied weights are there once.
    missing = [name for name, value in expected.items() if value.data_ptr() not in there]
    if missing:
        raise ValueError(f"{missing[0]} is missing")


def _check_log(file: Path, step: int) -> None:
    # The states of callbacks have no types; ours have none.
    state = from_json(TrainerState, {**read_json(file), "stateful_callbacks": []})
    if state.global_step != step:
        raise ValueError(f"it is of step {state.global_step}")
    if not all("step" in log for log in state.log_history):
        raise ValueError("log_history: expected a step in each entry")


def _check_optimizer(file: Path, optimizer: Optimizer) -> None:
    groups = _settings(optimizer)
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    _check_like(_settings(optimizer), groups, "param_groups")
    number = 0
    for group in optimizer.param_groups:
        names = ADAM if "betas" in group else MUON
        for parameter in group["params"]:
            wanted: dict[str, Any] = dict.fromkeys(names, parameter)
            if "step" in names:
                wanted["step"] = torch.zeros(()) if "fused" in group else 0
            # A parameter that has had no gradient has no state.
            _check_like(optimizer.state.pop(parameter, wanted), wanted, f"parameter {number}")
            number += 1
    if optimizer.state:
        raise ValueError("it has the states of other parameters")


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _check_schedule(file: Path, schedule: LRScheduler, step: int) -> None:
    fresh, found = schedule.state_dict(), torch.load(file, map_location="cpu", weights_only=True)
    for name in found.keys() - fresh.keys():
        if hasattr(schedule, name):  # which it would replace
            raise ValueError(f"{name} is not as in this training")
    schedule.load_state_dict(found)
    _check_like(schedule.state_dict(), fresh, "the schedule")
    if schedule.last_epoch != step:
        raise ValueError(f"it is of step {schedule.last_epoch}")


def _check_random_state(file: Path) -> None:
    with safe_globals():
        found = torch.load(file, map_location="cpu", weights_only=True)
    random.Random().setstate(found["python"])
    np.random.RandomState().set_state(found["numpy"])
    torch.Generator().set_state(found["cpu"])


def _check_like(found: Any, expected: Any, where: str) -> None:
    """Check that a value is finite and has the type of another, and its shape and dtype, its length or its names."""
    if isinstance(expected, Tensor):
        fits = isinstance(found, Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype)
        fits = fits and bool(found.isfinite().all())
    elif isinstance(expected, dict):
        fits = isinstance(found, dict) and expected.keys() <= found.keys()
    elif isinstance(expected, list | tuple):
        fits = isinstance(found, list | tuple) and len(found) == len(expected)
    elif type(expected) in (int, float):
        fits = type(found) in (int, float) and math.isfinite(found)
    else:
        fits = type(found) is type(expected)
    if not fits:
        raise ValueError(f"{where} is not as in this training")
    if isinstance(expected, dict | list | tuple):
        for name in expected if isinstance(expected, dict) else range(len(expected)):
            _check_like(found[name], expected[name], f"{where}[{name!r}]")
