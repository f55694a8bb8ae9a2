"""MPNet: a number per head and bucket of distances, which all layers share."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ....errors import InputError
from ....kernels import OffsetBias
from ....kernels.varlen import PACKED
from ..served import Served, project_heads

FURTHEST = 128
"""From this distance on, all share a bucket."""

_packing: ContextVar[dict[str, Any]] = ContextVar("packing")


def packed(own: Served, *args: Any, **kwargs: Any) -> Any:
    """Run a model, which does not hand its layers where the texts of packed rows begin: they find it here."""
    given = {name: kwargs[name] for name in PACKED if kwargs.get(name) is not None}
    token = _packing.set({**_packing.get({}), **given})
    try:
        return type(own.layer).forward(own.layer, *args, **kwargs)
    finally:
        _packing.reset(token)


def distances(own: Served, hidden: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Tensor:
    """Return the bias as a table (heads, offsets), which the encoder hands to its layers in place of the matrix."""
    if position_ids is not None:
        raise InputError("position_ids", "whereformer's attention takes positions 0 .. n - 1 of MPNet; expected None")
    reach = min(hidden.shape[1] - 1, FURTHEST)
    offsets = torch.arange(-reach, reach + 1, device=hidden.device)
    buckets = own.layer.relative_position_bucket(offsets, num_buckets, FURTHEST)
    table: Tensor = own.layer.relative_attention_bias(buckets).mT
    return table


def mpnet(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute the attention of MPNet."""
    layer = own.layer
    query, key, value = project_heads(hidden_states, layer.num_attention_heads, layer.q, layer.k, layer.v)
    out, weights = own.attend(
        query,
        key,
        value,
        () if position_bias is None else (OffsetBias(position_bias, -(position_bias.shape[1] // 2)),),
        attention_mask,
        dropout=layer.dropout.p,
        output_attentions=output_attentions,
        **_packing.get({}),
        **options,
    )
    out = layer.o(out)
    return (out, weights) if output_attentions and weights is not None else (out,)
