"""DeBERTa, versions 1 to 3: the content of queries with positions of keys, and of keys with positions of queries."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ....errors import InputError
from ....kernels import OffsetKeys, OffsetQueries, Term
from ....kernels.varlen import PACKED
from ..patched_forward import PatchedForward, project_heads, split_heads


def disentangled(
    patch: PatchedForward,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    output_attentions: bool = False,
    rel_embeddings: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of any version, with embeddings of distances that are projected to keys and queries."""
    layer = patch.layer
    if hasattr(layer, "in_proj"):  # version 1
        if layer.talking_head:
            raise InputError("talking_head", "it mixes the scores of heads, which terms cannot express")
        # The projection has query, key and value of a head side by side.
        projected = split_heads(layer.in_proj(hidden_states), layer.num_attention_heads)
        query, key, value = projected.chunk(3, dim=3)
        bias_q, bias_v = (bias.view(layer.num_attention_heads, 1, -1) for bias in (layer.q_bias, layer.v_bias))
        query, value = query + bias_q, value + bias_v
        names = ("pos_proj", "pos_q_proj")
    else:
        qkv_projections = layer.query_proj, layer.key_proj, layer.value_proj
        query, key, value = project_heads(hidden_states, layer.num_attention_heads, *qkv_projections)
        names = ("key_proj", "query_proj") if layer.share_att_key else ("pos_key_proj", "pos_query_proj")
    projections = {kind: name for kind, name in zip(("c2p", "p2c"), names, strict=True) if kind in layer.pos_att_type}
    # The models compute it in float32, which makes a difference in float64.
    scale = torch.tensor(query.shape[3] * (1 + len(projections)), dtype=torch.float32).sqrt().to(query.dtype)
    terms: list[Term] = []
    if layer.relative_attention:
        assert rel_embeddings is not None
        max_distance = layer.max_relative_positions
        size, buckets = getattr(layer, "pos_ebd_size", max_distance), getattr(layer, "position_buckets", -1)
        reach = min(query.shape[2] - 1, max_distance)  # farther distances use the first and the last embedding
        # Distances are query position - key position.
        distances = torch.arange(reach, -reach - 1, -1, device=query.device)
        if buckets > 0:
            make_buckets = sys.modules[type(layer).__module__].make_log_bucket_position
            distances = make_buckets(distances, buckets, max_distance).long()
        start = 0 if buckets > 0 else max(size - reach - 1, 0)  # the first embedding that a text of this length uses
        rows = (distances + size).clamp(0, 2 * size - 1) - start
        vectors = layer.pos_dropout(rel_embeddings)[start : 2 * size - start]
        for kind, name in projections.items():
            heads = split_heads(getattr(layer, name)(vectors)[None], layer.num_attention_heads)[0]
            table = heads.index_select(1, rows)  # (heads, offsets, head_dim)
            terms.append(OffsetKeys(table, -reach) if kind == "c2p" else OffsetQueries(table / scale, -reach))
    options |= {"scaling": 1.0, "dropout": layer.dropout.p, "output_attentions": output_attentions}
    return patch.attend(query / scale, key, value, tuple(terms), attention_mask, **options)


def unpacked(patch: PatchedForward, *args: object, **kwargs: object) -> object:
    """Run a model, but refuse the arguments of packed rows, which the model would ignore."""
    for name in PACKED:
        if kwargs.get(name) is not None:
            raise InputError(name, "a DeBERTa does not pass it on to its layers; put each text in its own row")
    return type(patch.layer).forward(patch.layer, *args, **kwargs)


def padding(patch: PatchedForward, attention_mask: Tensor) -> Tensor:
    """Return a padding mask as (batch, 1, 1, n): the results of padded queries are not used."""
    if attention_mask.dim() <= 2:
        return attention_mask[:, None, None].bool()
    return type(patch.layer).get_attention_mask(patch.layer, attention_mask).bool()


def no_distances(
    patch: PatchedForward, hidden_states: Tensor, query_states: object = None, relative_pos: Tensor | None = None
) -> Tensor | None:
    """Return the caller's distances, mostly None, instead of a matrix of distances."""
    return relative_pos
