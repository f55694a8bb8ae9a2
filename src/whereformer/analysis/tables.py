"""Finds position tables in checkpoints of models that this library does not run, by transformers' names.

This reads the position embeddings of GPT-2, BART, DistilBERT, ViT and many others, and the curve of each head of T5. It
cannot read what else the model does with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
from ..positions import build_position
from ..positions.t5 import T5

EMBEDDINGS = re.compile(r"(^|\.)(position_embeddings?|positional_embedding|embed_positions|pos_embed|wpe)(\.weight)?$")
"""The names of tables with a row for each position."""
BUCKETS = re.compile(r"\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.weight$")
"""The names of T5's tables, (buckets, heads), with the number of the layer."""
ROWS_BEFORE = {"bart": 2, "mbart": 2, "plbart": 2, "opt": 2}
"""The number of rows before that of the first position, by model_type."""
COUNTED_FROM_PADDING = ("xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text")
"""Model types, such as RoBERTa, whose rows up to that of ``pad_token_id`` are not positions."""


def embedding_table(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[str, Tensor] | None:
    """Return the name and the position embeddings (n, width) in float64, the encoder's if there are several; or None.

    Raises:
        InputError: if the table has no rows for positions.
    """
    names = sorted((name for name in weights if EMBEDDINGS.search(name)), key=lambda name: ("decoder" in name, name))
    for name in names:
        table = weights[name].squeeze(0) if weights[name].dim() == 3 else weights[name]
        if table.dim() == 2 and table.is_floating_point():
            kind = config.get("model_type")
            padding = config.get("pad_token_id")
            start = ROWS_BEFORE.get(str(kind), 0)
            if kind in COUNTED_FROM_PADDING:
                start = (1 if padding is None else _whole("pad_token_id", padding, len(table))) + 1
            if table[start:].numel() == 0:
                raise InputError("checkpoint", f"{name!r} has shape {tuple(table.shape)}, which holds no positions")
            return name, table[start:].double()
    return None


def bucket_curves(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], offsets: Tensor
) -> tuple[str, dict[int, Tensor]] | None:
    """Return the part that was read ("encoder" or "decoder") and each head's curve (heads, offsets) by layer; or None.

    Args:
        weights: the weights of a checkpoint of T5, mT5 or a similar model, by name.
        config: its config.json.
        offsets: key position - query position, whole.

    Raises:
        InputError: if a table is none of T5's.
    """
    for part in ("encoder", "decoder"):
        curves = {}
        for name in sorted(weights):
            match = BUCKETS.search(name)
            if match and f"{part}." in name:
                if weights[name].dim() != 2 or not weights[name].is_floating_point() or not weights[name].numel():
                    found = f"{weights[name].dtype} of shape {tuple(weights[name].shape)}"
                    raise InputError("checkpoint", f"{name!r} is {found}, expected numbers for (buckets, heads)")
                buckets, heads = weights[name].shape
                position = build_position(
                    "t5",
                    hidden_size=heads,
                    num_heads=heads,
                    causal=part == "decoder",
                    num_buckets=buckets,
                    max_distance=_whole(
                        "relative_attention_max_distance", config.get("relative_attention_max_distance", 128)
                    ),
                )
                assert isinstance(position, T5)
                with torch.no_grad():
                    position.weight.copy_(weights[name].mT)
                    curves[int(match[1])] = position.curve(offsets).double()
        if curves:
            return part, dict(sorted(curves.items()))
    return None


def _whole(name: str, value: Any, most: int = 2**31 - 1) -> int:
    """Check a number of an untrusted configuration."""
    if type(value) is not int or not 0 <= value <= most:
        raise InputError(name, f"expected a whole number from 0 to {most} in config.json, got {shown(value)}")
    return value
