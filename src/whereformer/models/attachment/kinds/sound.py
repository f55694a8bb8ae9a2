"""Models of sound: vectors of offsets (conformers) and gated biases (WavLM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....errors import InputError
from ....kernels import OffsetKeys, Term
from ..served import Served, project_heads, split_heads


def conformer(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Any = None,
    relative_position_embeddings: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of Wav2Vec2-BERT, Wav2Vec2-Conformer and SeamlessM4T with any of their positions."""
    layer = own.layer
    kind = layer.position_embeddings_type
    placed = hidden_states
    if kind == "rotary" and relative_position_embeddings is not None:
        placed = layer._apply_rotary_embedding(hidden_states, relative_position_embeddings)
    query, key, value = (
        split_heads(project(hidden), layer.num_heads)
        for project, hidden in ((layer.linear_q, placed), (layer.linear_k, placed), (layer.linear_v, hidden_states))
    )
    terms: tuple[Term, ...] = ()
    if kind == "relative_key":
        table = layer.distance_embedding.weight.to(query.dtype)
        terms = (OffsetKeys(table[None], -layer.left_max_position_embeddings),)
    elif kind == "relative" and relative_position_embeddings is not None:  # SeamlessM4T v2 has none, and no positions
        terms = (_of_distances(layer.linear_pos(relative_position_embeddings), query, layer.pos_bias_v),)
        query = query + layer.pos_bias_u[:, None]
    out, weights = own.attend(query, key, value, terms, attention_mask, dropout=layer.dropout.p, **options)
    return layer.linear_out(out), weights


def chunks(own: Served, attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """Return the mask of SeamlessM4T v2, whose tokens see no chunks that follow: no matrix if all are in one chunk."""
    layer = own.layer
    if hidden_states.shape[1] <= layer.config.speech_encoder_chunk_size:
        return attention_mask
    mask: Tensor = type(layer)._apply_chunk_attention(layer, attention_mask, hidden_states)
    return mask


def parakeet(
    own: Served,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute Parakeet's attention, that of Transformer-XL with grouped heads.

    The mask has all pairs of real tokens, so that its columns say which keys are real.
    """
    layer = own.layer
    if layer.training and layer.config.dropout_positions > 0:
        raise InputError("dropout_positions", "each row would have positions of its own; set it to 0 in the config")
    query, key, value = (
        project(hidden_states).unflatten(2, (-1, layer.head_dim)).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    terms = (_of_distances(layer.relative_k_proj(position_embeddings[:1]), query, layer.bias_v),)
    out, weights = own.attend(
        query + layer.bias_u[:, None],
        key,
        value,
        terms,
        None if attention_mask is None else attention_mask.any(2, keepdim=True),
        scaling=layer.scaling,
        dropout=layer.attention_dropout,
        **options,
    )
    return layer.o_proj(out), weights


def _of_distances(vectors: Tensor, query: Tensor, bias: Tensor) -> OffsetKeys:
    """Return the scores that Transformer-XL's vectors of distances give.

    Args:
        vectors: (1, 2 * n - 1, heads * head_dim), for queries from n - 1 behind a key to n - 1 before it.
        query: (batch, heads, n, head_dim).
        bias: (heads, head_dim), which is added to queries.
    """
    table = split_heads(vectors, query.shape[1])[0]
    return OffsetKeys(table, 1 - query.shape[2], query_factors=(query + bias[:, None]) * query.shape[3] ** -0.5)


def wavlm(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    index: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute WavLM's attention: a table over offsets, in buckets, times a gate for each query.

    The first layer hands the table (heads, offsets, 1) to the others, as in the model itself the matrix.
    """
    layer = own.layer
    query, key, value = project_heads(hidden_states, layer.num_heads, layer.q_proj, layer.k_proj, layer.v_proj)
    table = position_bias
    if table is None:
        reach = min(hidden_states.shape[1] - 1, layer.max_distance)
        offsets = torch.arange(-reach, reach + 1, device=hidden_states.device)
        table = layer.rel_attn_embed(layer._relative_positions_bucket(offsets)).mT.unsqueeze(2)
    gates = layer.gru_rel_pos_linear(split_heads(hidden_states, layer.num_heads)).unflatten(3, (2, 4)).sum(4)
    one, other = gates.sigmoid().split(1, dim=3)
    gate = one * (other * layer.gru_rel_pos_const - 1) + 2  # (batch, heads, n, 1)
    out, weights = own.attend(
        query,
        key,
        value,
        (OffsetKeys(table, -(table.shape[1] // 2), query_factors=gate),),
        None if attention_mask is None else attention_mask[:, None, None] == 1,
        dropout=layer.dropout,
        **options,
    )
    return layer.out_proj(out), weights, table
