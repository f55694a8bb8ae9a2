"""The configurations of a model: an attached model gets copies, because other models may share the objects."""

from __future__ import annotations

import copy
from functools import partial

from torch import nn
from transformers import PreTrainedConfig

from .hooks import Undo


def all_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return all configurations of a model's modules, and the configurations inside those, each once."""
    configs: dict[int, PreTrainedConfig] = {}

    def visit(value: object) -> None:
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

    ``undo`` gets functions that restore the old objects. If the user changes a copy before that, as by
    ``resize_token_embeddings``, these functions make the same changes in the old object.
    """
    memo: dict[int, object] = {}
    for config in all_configs(model):
        copied = copy.deepcopy(config, memo)
        undo.append(partial(_carry_over, config, copied, copy.deepcopy(_fields(copied))))
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                undo.append(partial(setattr, module, name, value))
                setattr(module, name, memo[id(value)])


SAVED_FIELDS = ("architectures", "dtype")
"""The fields that ``save_pretrained`` writes; it does not change the model."""


def _fields(config: PreTrainedConfig) -> dict[str, object]:
    """Return the fields of a configuration that its user may change, except inner configurations."""
    fields = vars(config).items()
    return {
        name: value for name, value in fields if name not in SAVED_FIELDS and not isinstance(value, PreTrainedConfig)
    }


def _carry_over(old: PreTrainedConfig, copied: PreTrainedConfig, before: dict[str, object]) -> None:
    """Make the changes of a copied configuration in the original."""
    after = _fields(copied)
    for name in before.keys() - after.keys():
        vars(old).pop(name, None)
    vars(old).update({name: value for name, value in after.items() if name not in before or before[name] != value})
