"""The positions that a model has itself: switches them off and on again, and makes T5's biases a table over offsets."""

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
from .hooks import Args, Kwargs, Undo


class NoEmbedding(nn.Module):
    """A position embedding that adds nothing."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class NoRotation(nn.Module):
    """A rotary embedding that rotates nothing: cosine 1 and sine 0."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return hidden.new_ones(1, 1, 1), hidden.new_zeros(1, 1, 1)


def disable_positions(model: PreTrainedModel, undo: Undo) -> bool:
    """Switch the model's own positions off; return whether it has any."""
    replacements: list[tuple[nn.Module, str, nn.Module | None]] = []
    for module in model.modules():
        for name in ("position_embeddings", "wpe"):
            if isinstance(getattr(module, name, None), nn.Embedding):
                replacements.append((module, name, NoEmbedding()))
                if "token_type_ids" in module._buffers:
                    # This buffer is as long as the table of positions. Without it, types are zeros at any length.
                    replacements.append((module, "token_type_ids", None))
        if isinstance(getattr(module, "rotary_emb", None), nn.Module):
            replacements.append((module, "rotary_emb", NoRotation()))
        if holds_bias_table(module) and accepts_position_bias(module):
            replacements.append((module, "relative_attention_bias", None))
    for owner, name, replacement in replacements:
        original = getattr(owner, name)
        undo.append(partial(_restore, model, owner, name, original))
        if isinstance(original, nn.Module):
            setattr(owner, name, replacement)
        else:  # a buffer
            delattr(owner, name)
    return bool(replacements)


def has_rotary(model: PreTrainedModel) -> bool:
    """Whether a model has rotary embeddings, by the names of their classes in transformers."""
    return any(re.search("Rotary|Rope|RoPE", type(module).__name__) for module in model.modules())


def _restore(model: PreTrainedModel, owner: nn.Module, name: str, original: nn.Module | Tensor) -> None:
    # The model may have moved to another device or dtype since.
    if isinstance(original, nn.Module):
        original.to(model.device)
        for parameter in original.parameters():
            parameter.data = parameter.data.to(model.dtype)
        setattr(owner, name, original)
    else:
        owner.register_buffer(name, original.to(model.device), persistent=False)


def accepts_position_bias(module: nn.Module) -> bool:
    """Whether a layer accepts T5's biases as an argument and passes them on."""
    return hasattr(module, "relative_attention_num_buckets") and (
        "position_bias" in inspect.signature(type(module).forward).parameters
    )


def pass_bias_tables(layers: Iterable[nn.Module], undo: Undo) -> None:
    """Hook the layers that accept T5's biases, so that they get tables over offsets."""
    for layer in layers:
        if accepts_position_bias(layer):
            undo.append(layer.register_forward_pre_hook(BiasTableHook(layer), with_kwargs=True).remove)


def holds_bias_table(module: nn.Module) -> bool:
    """Whether a layer of T5 holds the table of biases; the other layers get the biases from it."""
    return getattr(module, "has_relative_attention_bias", False)


class BiasTableHook:
    """A hook before T5's attention layers that passes them the biases as a table over offsets, not a matrix."""

    def __init__(self, module: Any) -> None:
        max_distance = module.relative_attention_max_distance
        exact = module.relative_attention_num_buckets // (2 if module.is_decoder else 4)
        if max_distance <= exact:
            reason = f"expected more than {exact} (the exact buckets), got {max_distance}"
            raise InputError("relative_attention_max_distance", reason)
        buckets = module._relative_position_bucket(
            torch.arange(-max_distance, max_distance + 1),
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=max_distance,
        )
        self.first, self.buckets = -max_distance, tuple(buckets.tolist())

    def __call__(self, module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        bias = kwargs.get("position_bias")
        if bias is None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if holds_bias_table(module) and module.relative_attention_bias is not None:
                rows = module.relative_attention_bias(torch.tensor(self.buckets, device=hidden.device))
                bias = rows.mT[None, :, None]  # (1, heads, 1, offsets)
            else:
                bias = hidden.new_zeros(1, module.n_heads, 1, 1)
        return args, {**kwargs, "position_bias": bias, "whereformer_first": self.first}
