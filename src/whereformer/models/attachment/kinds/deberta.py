"""DeBERTa, versions 1 to 3: the content of queries with positions of keys, and of keys with positions of queries."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ....errors import InputError
from ....kernels import OffsetKeys, OffsetQueries, Term
from ....kernels.varlen import PACKED
from ..served import Served, project_heads, split_heads


def deberta(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    output_attentions: bool = False,
    rel_embeddings: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of DeBERTa's first version."""
    layer = own.layer
    if layer.talking_head:
        raise InputError("talking_head", "it mixes the scores of heads, which no term can say")
    # The projection has query, key and value of a head side by side.
    projected = split_heads(layer.in_proj(hidden_states), layer.num_attention_heads)
    query, key, value = projected.chunk(3, dim=3)
    bias_q, bias_v = (bias.view(layer.num_attention_heads, 1, -1) for bias in (layer.q_bias, layer.v_bias))
    names, options["output_attentions"] = ("pos_proj", "pos_q_proj"), output_attentions
    return _attend(own, query + bias_q, key, value + bias_v, rel_embeddings, names, attention_mask, options)


def deberta_v2(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    output_attentions: bool = False,
    rel_embeddings: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of DeBERTa's versions 2 and 3."""
    layer = own.layer
    projections = layer.query_proj, layer.key_proj, layer.value_proj
    query, key, value = project_heads(hidden_states, layer.num_attention_heads, *projections)
    names = ("key_proj", "query_proj") if layer.share_att_key else ("pos_key_proj", "pos_query_proj")
    options["output_attentions"] = output_attentions
    return _attend(own, query, key, value, rel_embeddings, names, attention_mask, options)


def _attend(
    own: Served,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embeddings: Tensor | None,
    names: tuple[str, str],
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend with embeddings of distances, which the layers of these names project for queries and for keys."""
    layer = own.layer
    kinds = {kind: name for kind, name in zip(("c2p", "p2c"), names, strict=True) if kind in layer.pos_att_type}
    # The models compute it in float32, which counts in float64.
    scale = torch.tensor(query.shape[3] * (1 + len(kinds)), dtype=torch.float32).sqrt().to(query.dtype)
    terms: list[Term] = []
    if layer.relative_attention:
        assert embeddings is not None
        furthest = layer.max_relative_positions
        size, buckets = getattr(layer, "pos_ebd_size", furthest), getattr(layer, "position_buckets", -1)
        reach = min(query.shape[2] - 1, furthest)  # farther ones read the rows at the ends
        # Distances are those of the query from the key.
        distances = torch.arange(reach, -reach - 1, -1, device=query.device)
        if buckets > 0:
            distances = (
                sys.modules[type(layer).__module__].make_log_bucket_position(distances, buckets, furthest).long()
            )
        low = 0 if buckets > 0 else max(size - reach - 1, 0)  # of the rows that a text of this length reads
        rows = (distances + size).clamp(0, 2 * size - 1) - low
        vectors = layer.pos_dropout(embeddings)[low : 2 * size - low]
        for kind, name in kinds.items():
            heads = split_heads(getattr(layer, name)(vectors)[None], layer.num_attention_heads)[0]
            table = heads.index_select(1, rows)  # (heads, offsets, head_dim)
            terms.append(OffsetKeys(table, -reach) if kind == "c2p" else OffsetQueries(table / scale, -reach))
    arguments = query / scale, key, value, tuple(terms), mask
    return own.attend(*arguments, scaling=1.0, dropout=layer.dropout.p, **options)


def unpacked(own: Served, *args: Any, **kwargs: Any) -> Any:
    """Run a model, which drops arguments that it does not know: those of packed rows, too."""
    for name in PACKED:
        if kwargs.get(name) is not None:
            raise InputError(name, "a DeBERTa does not hand it to its layers; give each text a row of its own")
    return type(own.layer).forward(own.layer, *args, **kwargs)


def padding(own: Served, attention_mask: Tensor) -> Tensor:
    """Return a mask of padding as (batch, 1, 1, n): what padded queries see does not count."""
    if attention_mask.dim() <= 2:
        return attention_mask[:, None, None].bool()
    return type(own.layer).get_attention_mask(own.layer, attention_mask).bool()


def no_distances(own: Served, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None) -> Any:
    """Return what the caller asked for in place of a matrix of distances: mostly None."""
    return relative_pos
