"""DeBERTa's version 3: its options as ours, and its one table of positions as each layer's vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import InputError, shown
from ..config import EncoderConfig

TABLE, KEYS, QUERIES, BIAS = (f"encoder.{name}" for name in ("positions", "pos_keys", "pos_queries", "pos_query_bias"))
"""The names of what :func:`deberta_state` computes."""

_OF_VERSION_3 = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "conv_kernel_size": 0,
}


def deberta_options(config: Any) -> dict[str, Any]:
    """Return the fields of a DeBERTa that depend on several of its options, or are named otherwise.

    Raises:
        InputError: for an option that is not as in version 3; the message names it.
    """
    given = {name: getattr(config, name, None) or type(wanted)() for name, wanted in _OF_VERSION_3.items()}
    given["pos_att_type"] = sorted(config.pos_att_type or ())
    for name, wanted in {**_OF_VERSION_3, "pos_att_type": ["c2p", "p2c"]}.items():
        if given[name] != wanted:
            raise InputError(
                name, f"expected {wanted!r}, as in DeBERTa's version 3, got {shown(given[name])}; attach takes others"
            )
    return {
        "position": "deberta",
        "position_options": {"max_distance": _reach(config), "num_buckets": _buckets(config)},
        "classifier_dropout": getattr(config, "cls_dropout", None),
        "classifier_act": config.pooler_hidden_act,
    }


def deberta_state(state: Mapping[str, Tensor], config: EncoderConfig, original: Any) -> dict[str, Tensor]:
    """Return the tensors with vectors of positions for each layer.

    All layers read one table, which is normalized, and project it as they project words. Here the table is the
    normalized one, and the projections are copies: what the model computes is the same, but it trains them apart. A
    bias of keys adds the same number to all scores of a query, so it is left out.
    """
    state = dict(state)
    names = ("rel_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias")
    table, weight, bias = (state.pop(f"encoder.{name}", None) for name in names)
    if table is not None and weight is not None and bias is not None:
        normalized = functional.layer_norm(table, table.shape[1:], weight, bias, original.layer_norm_eps)
        state[TABLE] = normalized[: 2 * (_buckets(original) or _reach(original))]
    for ours, theirs in ((KEYS, "key_proj.weight"), (QUERIES, "query_proj.weight"), (BIAS, "query_proj.bias")):
        layers = range(max(config.passes) + 1)
        parts = [state.get(f"encoder.layer.{layer}.attention.self.{theirs}") for layer in layers]
        if found := [part for part in parts if part is not None]:
            state[ours] = torch.stack(found)
    return state


def _buckets(config: Any) -> int | None:
    """Return the number of buckets of distances; None if each distance has a row."""
    buckets: int = getattr(config, "position_buckets", -1)
    return buckets if buckets > 0 else None


def _reach(config: Any) -> int:
    """Return the distance from which all look alike."""
    reach: int = getattr(config, "max_relative_positions", -1)
    return reach if reach > 0 else config.max_position_embeddings
