"""The configurations of a model: an attached model gets copies, because other models may share the objects."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .hooks import Undo


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations of a model's modules and those inside them, each once."""
    configs: dict[int, PreTrainedConfig] = {}

    def visit(value: Any) -> None:
        if isinstance(value, PreTrainedConfig) and id(value) not in configs:
            configs[id(value)] = value
            for inner in vars(value).values():
                visit(inner)

    for module in model.modules():
        for value in vars(module).values():
            visit(value)
    return list(configs.values())


def separate_configs(model: nn.Module, undo: Undo) -> None:
    """Give a model, and all modules inside, copies of their configurations.

    ``undo`` gets what gives the old objects back. Changes that the model's user makes to a copy until then, as by
    ``resize_token_embeddings``, are made to the old object, too.
    """
    memo: dict[int, Any] = {}
    for config in configs_of(model):
        copied = copy.deepcopy(config, memo)
        undo.append(partial(_carry_over, config, copied, copy.deepcopy(_fields(copied))))
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                undo.append(partial(_set, module, name, value))
                _set(module, name, memo[id(value)])


def _set(module: nn.Module, name: str, config: PreTrainedConfig) -> None:
    vars(module)[name] = config


BY_SAVING = ("architectures", "dtype")
"""The fields into which ``save_pretrained`` writes, which does not change the model."""


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that its user may change, except for the configurations inside."""
    fields = vars(config).items()
    return {name: value for name, value in fields if name not in BY_SAVING and not isinstance(value, PreTrainedConfig)}


def _carry_over(old: PreTrainedConfig, copied: PreTrainedConfig, before: dict[str, Any]) -> None:
    """Make the changes of a copy in the configuration that it was made of."""
    after = _fields(copied)
    for name in before.keys() - after.keys():
        vars(old).pop(name, None)
    vars(old).update({name: value for name, value in after.items() if name not in before or before[name] != value})
