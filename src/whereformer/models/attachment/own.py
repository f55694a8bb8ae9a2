"""The model's own positions: switches them off and back on, and turns T5's biases into a table over offsets."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import InputError
from .hooks import Undo


class NoEmbedding(nn.Module):
    """A position embedding that adds nothing."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class NoRotation(nn.Module):
    """A rotary embedding that rotates nothing: cosine 1 and sine 0."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return hidden.new_ones(1, 1, 1), hidden.new_zeros(1, 1, 1)


def switch_off(model: PreTrainedModel, undo: Undo) -> bool:
    """Switch the model's own positions off; return whether it has any."""
    replacements: list[tuple[nn.Module, str, nn.Module | None]] = []
    for module in model.modules():
        for name in ("position_embeddings", "wpe"):
            own = getattr(module, name, None)
            if isinstance(own, nn.Embedding):
                replacements.append((module, name, NoEmbedding()))
                if "token_type_ids" in module._buffers:
                    # This buffer is as long as the table of positions. Without it, types are zeros at any length.
                    replacements.append((module, "token_type_ids", None))
        if isinstance(getattr(module, "rotary_emb", None), nn.Module):
            replacements.append((module, "rotary_emb", NoRotation()))
        if own_table(module) and takes_bias(module):
            replacements.append((module, "relative_attention_bias", None))
    for owner, name, by in replacements:
        _replace(model, owner, name, by, undo)
    return bool(replacements)


def rotates(model: PreTrainedModel) -> bool:
    """Whether a model has rotary embeddings of its own, by the names that transformers gives their classes."""
    return any(re.search("Rotary|Rope|RoPE", type(module).__name__) for module in model.modules())


def _replace(model: PreTrainedModel, owner: nn.Module, name: str, by: nn.Module | None, undo: Undo) -> None:
    """Replace a module, or remove a buffer."""
    own = getattr(owner, name)
    undo.append(partial(_put_back, model, owner, name, own))
    if isinstance(own, nn.Module):
        setattr(owner, name, by)
    else:
        delattr(owner, name)


def _put_back(model: PreTrainedModel, owner: nn.Module, name: str, own: nn.Module | Tensor) -> None:
    # The model may have moved to another device or dtype since.
    if isinstance(own, nn.Module):
        own.to(model.device)
        for parameter in own.parameters():
            parameter.data = parameter.data.to(model.dtype)
        setattr(owner, name, own)
    else:
        owner.register_buffer(name, own.to(model.device), persistent=False)


def takes_bias(module: nn.Module) -> bool:
    """Whether a layer takes T5's biases as an argument and passes them on."""
    return hasattr(module, "relative_attention_num_buckets") and (
        "position_bias" in inspect.signature(type(module).forward).parameters
    )


def serve_tables(layers: Iterable[nn.Module], undo: Undo) -> None:
    """Let layers that take T5's biases get them as tables over offsets."""
    for layer in layers:
        if takes_bias(layer):
            undo.append(layer.register_forward_pre_hook(OwnBias(layer), with_kwargs=True).remove)


def own_table(module: nn.Module) -> bool:
    """Whether a layer of T5 holds the table of biases; the other layers get the biases from this one."""
    return getattr(module, "has_relative_attention_bias", False)


class OwnBias:
    """A hook before T5's attention layers that passes them the biases as a table over offsets, not a matrix."""

    def __init__(self, module: Any) -> None:
        furthest = module.relative_attention_max_distance
        exact = module.relative_attention_num_buckets // (2 if module.is_decoder else 4)
        if furthest <= exact:
            raise InputError(
                "relative_attention_max_distance", f"expected more than {exact} (the exact buckets), got {furthest}"
            )
        buckets = module._relative_position_bucket(
            torch.arange(-furthest, furthest + 1),
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=furthest,
        ).tolist()
        self.first = -furthest
        self.buckets = tuple(buckets)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bias = kwargs.get("position_bias")
        if bias is None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if own_table(module) and module.relative_attention_bias is not None:
                rows = module.relative_attention_bias(torch.tensor(self.buckets, device=hidden.device))
                bias = rows.mT[None, :, None]  # (1, heads, 1, offsets)
            else:
                bias = hidden.new_zeros(1, module.n_heads, 1, 1)
        return args, {**kwargs, "position_bias": bias, "whereformer_first": self.first}
