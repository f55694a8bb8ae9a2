"""DeBERTa's versions 2 and 3: their options as ours, and their one table of positions as each layer's vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import InputError

TABLE, KEYS, QUERIES, BIAS = (f"encoder.{name}" for name in ("positions", "pos_keys", "pos_queries", "pos_query_bias"))
"""The names of what :func:`deberta_state` computes."""


def deberta_options(config: Any) -> dict[str, Any]:
    """Return the fields of a DeBERTa that depend on several of its options, or are named otherwise.

    Raises:
        InputError: for an option that has no counterpart; the message names it.
    """
    if getattr(config, "conv_kernel_size", 0) > 0:
        raise InputError("conv_kernel_size", "the checkpoint has a convolution beside its first layer; expected 0")
    kinds = [kind for kind in ("c2p", "p2c") if kind in (config.pos_att_type or ())]
    relative = config.relative_attention and bool(kinds)
    if bool(kinds) != relative or config.relative_attention != relative:
        raise InputError("pos_att_type", f"expected 'c2p' or 'p2c' with relative_attention and only then, got {kinds}")
    names = ["learned"] * config.position_biased_input + ["deberta"] * relative
    fields = {
        "position": "+".join(names) or "none",
        "classifier_dropout": getattr(config, "cls_dropout", None),
        "classifier_act": config.pooler_hidden_act,
    }
    if relative:
        buckets = getattr(config, "position_buckets", -1)
        fields["position_options"] = {
            "max_distance": _reach(config),
            "num_buckets": buckets if buckets > 0 else None,
            "c2p": "c2p" in kinds,
            "p2c": "p2c" in kinds,
        }
    return fields


def deberta_names(config: Any) -> dict[str, str]:
    """Return our names of the tensors of positions, with theirs."""
    parts = config.position.split("+")
    names = {}
    for number, part in enumerate(parts):
        prefix = f"position.parts.{number}" if len(parts) > 1 else "position"
        if part == "learned":
            names[f"{prefix}.weight"] = "embeddings.position_embeddings.weight"
        if part == "deberta":
            fields = {"table": TABLE, "key_weight": KEYS, "query_weight": QUERIES, "query_bias": BIAS}
            names |= {f"{prefix}.{ours}": theirs for ours, theirs in fields.items()}
    return names


def deberta_state(state: Mapping[str, Tensor], _: Any, config: Any) -> dict[str, Tensor]:
    """Return the tensors with vectors of positions for each layer; ``config`` is the checkpoint's own.

    All layers read one table. With ``share_att_key`` they project it as they project words, and with ``norm_rel_ebd``
    it is normalized first. Here the table is the normalized one, and the projections are copies: what the model
    computes is the same, but it trains them apart. A bias of keys adds the same number to all scores of a query, so it
    is left out.
    """
    state = dict(state)
    table = state.pop("encoder.rel_embeddings.weight", None)
    norm = [state.pop(f"encoder.LayerNorm.{kind}", None) for kind in ("weight", "bias")]
    if table is None:
        return state
    if "layer_norm" in str(getattr(config, "norm_rel_ebd", "none")).lower():
        if norm[0] is None or norm[1] is None:
            raise InputError("checkpoint", "expected 'encoder.LayerNorm', which norm_rel_ebd normalizes with, got none")
        table = functional.layer_norm(table, table.shape[1:], norm[0], norm[1], config.layer_norm_eps)
    buckets = getattr(config, "position_buckets", -1)
    state[TABLE] = table[: 2 * (buckets if buckets > 0 else _reach(config))]
    shared = getattr(config, "share_att_key", False)
    for ours, kind, name in ((KEYS, "c2p", "key"), (QUERIES, "p2c", "query")):
        if kind not in (config.pos_att_type or ()):
            continue
        projection = f"encoder.layer.{{}}.attention.self.{'' if shared else 'pos_'}{name}_proj."
        sources = {ours: "weight", BIAS: "bias"} if name == "query" else {ours: "weight"}
        for target, part in sources.items():
            names = [projection.format(layer) + part for layer in range(config.num_hidden_layers)]
            if all(each in state for each in names):
                state[target] = torch.stack([state[each] for each in names])
        if not shared:
            for each in [each for each in state if f".self.pos_{name}_proj." in each]:
                del state[each]
    return state


def _reach(config: Any) -> int:
    """Return the distance from which all look alike."""
    reach: int = getattr(config, "max_relative_positions", -1)
    return reach if reach > 0 else config.max_position_embeddings
