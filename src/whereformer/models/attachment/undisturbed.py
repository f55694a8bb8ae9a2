"""``undisturbed``: runs a model and leaves it, its configurations and the random numbers as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Run a model for evaluation, without gradients, and put back everything that this or the caller changes of it.

    Some models change when they run: BigBird-Pegasus replaces its sparse attention when it reads a short text. All
    attributes of all modules come back, among them hooks, submodules and training flags, and so do the contents of
    buffers, and all fields of configurations. Weights must not change.
    """
    kept = [_Kept(each) for each in (*model.modules(), *configs_of(model))]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for each in kept:
                each.put_back()
            for buffer, content in buffers:
                if not buffer.is_meta and not torch.equal(buffer, content):
                    buffer.copy_(content)


class _Kept:
    """The attributes of an object. Dictionaries, lists and sets among them are put back as the same objects."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.attributes = dict(vars(owner))
        self.contents = [
            (value, value.copy()) for value in self.attributes.values() if isinstance(value, dict | list | set)
        ]

    def put_back(self) -> None:
        vars(self.owner).clear()
        vars(self.owner).update(self.attributes)
        for value, content in self.contents:
            if not (value or content):
                continue
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)


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
