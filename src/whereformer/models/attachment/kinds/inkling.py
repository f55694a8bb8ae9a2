"""Inkling's text model: a bias over distances, mixed from learned profiles by each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....kernels import OffsetKeys
from ..served import Served


def inkling(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Any,
    conv_mask: Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute Inkling's attention: the profiles are a table over offsets, and a token's weights its factors."""
    layer = own.layer
    # transformers 5.24 renamed it. By place, either takes it.
    cache = past_key_values if cache is None else cache
    keys = layer.k_sconv(layer.k_proj(hidden_states), cache, conv_mask)
    values = layer.v_sconv(layer.v_proj(hidden_states), cache, conv_mask)
    query = layer.q_norm(layer.q_proj(hidden_states).unflatten(2, (-1, layer.head_dim))).transpose(1, 2)
    key = layer.k_norm(keys.unflatten(2, (-1, layer.head_dim))).transpose(1, 2)
    value = values.unflatten(2, (-1, layer.head_dim)).transpose(1, 2)
    factors = layer.r_proj(hidden_states).unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
    start = 0
    if cache is not None:
        start = cache.get_query_offset(layer.layer_idx)  # before the cache grows
        key, value = cache.update(key, value, layer.layer_idx)
    if not layer.is_sliding and layer.config.log_scaling_n_floor is not None:
        tokens = torch.arange(start + 1, start + 1 + query.shape[2], device=query.device).float()
        floor, alpha = layer.config.log_scaling_n_floor, layer.config.log_scaling_alpha
        tau = (1 + alpha * (tokens / floor).clamp(min=1).log())[:, None]
        query, factors = ((each.float() * tau).to(each.dtype) for each in (query, factors))
    # The table's rows go from the farthest token to the query itself, with zeros before and after.
    table = functional.pad(layer.rel_logits_proj.proj.mT.flip(0), (0, 0, 1, 1))
    out, weights = own.attend(
        query,
        key,
        value,
        (OffsetKeys(table[None], -layer.rel_extent, query_factors=factors),),
        attention_mask,
        scaling=layer.scaling,
        dropout=layer.attention_dropout,
        is_causal=True,
        **options,
    )
    return layer.o_proj(out), weights
