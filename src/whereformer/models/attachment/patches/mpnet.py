"""MPNet: a table with one bias per head and bucket of distances, which all layers share."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ....errors import InputError
from ....kernels import OffsetBias
from ....kernels.varlen import PACKED
from ..patched_forward import PatchedForward, project_heads

MAX_DISTANCE = 128
"""All larger distances share a bucket with this one."""

_packing: ContextVar[dict[str, Any]] = ContextVar("packing")


def packed(patch: PatchedForward, *args: object, **kwargs: object) -> object:
    """Run a model, and keep the arguments of packed rows for its layers: the model does not pass them on."""
    packing = {name: kwargs[name] for name in PACKED if kwargs.get(name) is not None}
    token = _packing.set({**_packing.get({}), **packing})
    try:
        return type(patch.layer).forward(patch.layer, *args, **kwargs)
    finally:
        _packing.reset(token)


def distances(patch: PatchedForward, hidden: Tensor, position_ids: object = None, num_buckets: int = 32) -> Tensor:
    """Return the bias as a table (heads, offsets), which the encoder passes to its layers instead of the matrix."""
    if position_ids is not None:
        raise InputError("position_ids", "whereformer's attention uses positions 0 .. n - 1 in MPNet; expected None")
    reach = min(hidden.shape[1] - 1, MAX_DISTANCE)
    offsets = torch.arange(-reach, reach + 1, device=hidden.device)
    buckets = patch.layer.relative_position_bucket(offsets, num_buckets, MAX_DISTANCE)
    table: Tensor = patch.layer.relative_attention_bias(buckets).mT
    return table


def mpnet(
    patch: PatchedForward,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute the attention of MPNet."""
    layer = patch.layer
    query, key, value = project_heads(hidden_states, layer.num_attention_heads, layer.q, layer.k, layer.v)
    terms = () if position_bias is None else (OffsetBias(position_bias, -(position_bias.shape[1] // 2)),)
    options |= {"dropout": layer.dropout.p, "output_attentions": output_attentions, **_packing.get({})}
    out, weights = patch.attend(query, key, value, terms, attention_mask, **options)
    out = layer.o(out)
    return (out, weights) if output_attentions and weights is not None else (out,)
