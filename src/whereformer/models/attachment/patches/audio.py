"""Audio models: vectors of offsets (conformers) and gated biases (WavLM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....errors import InputError
from ....kernels import OffsetKeys, Term
from ..masks import Mask
from ..patched_forward import PatchedForward, project_heads, split_heads


def conformer(
    patch: PatchedForward,
    hidden_states: Tensor,
    attention_mask: Mask = None,
    relative_position_embeddings: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of Wav2Vec2-BERT, Wav2Vec2-Conformer and SeamlessM4T with any of their positions."""
    layer = patch.layer
    kind = layer.position_embeddings_type
    rotated = hidden_states
    if kind == "rotary" and relative_position_embeddings is not None:
        rotated = layer._apply_rotary_embedding(hidden_states, relative_position_embeddings)
    query, key, value = (
        split_heads(project(hidden), layer.num_heads)
        for project, hidden in ((layer.linear_q, rotated), (layer.linear_k, rotated), (layer.linear_v, hidden_states))
    )
    terms: tuple[Term, ...] = ()
    if kind == "relative_key":
        table = layer.distance_embedding.weight.to(query.dtype)
        terms = (OffsetKeys(table[None], -layer.left_max_position_embeddings),)
    elif kind == "relative" and relative_position_embeddings is not None:  # SeamlessM4T v2 passes None: no positions
        terms = (_distance_scores(layer.linear_pos(relative_position_embeddings), query, layer.pos_bias_v),)
        query = query + layer.pos_bias_u[:, None]
    out, weights = patch.attend(query, key, value, terms, attention_mask, dropout=layer.dropout.p, **options)
    return layer.linear_out(out), weights


def chunks(patch: PatchedForward, attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """Return the mask of SeamlessM4T v2, where tokens do not see later chunks; no matrix if there is only one chunk."""
    layer = patch.layer
    if hidden_states.shape[1] <= layer.config.speech_encoder_chunk_size:
        return attention_mask
    mask: Tensor = type(layer)._apply_chunk_attention(layer, attention_mask, hidden_states)
    return mask


def parakeet(
    patch: PatchedForward,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute Parakeet's attention: Transformer-XL with grouped heads.

    The mask has all pairs of tokens that are not padding, so each of its columns shows whether a key is padding.
    """
    layer = patch.layer
    if layer.training and layer.config.dropout_positions > 0:
        raise InputError("dropout_positions", "each row would have different positions; set it to 0 in the config")
    query, key, value = (
        project(hidden_states).unflatten(2, (-1, layer.head_dim)).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    terms = (_distance_scores(layer.relative_k_proj(position_embeddings[:1]), query, layer.bias_v),)
    mask = None if attention_mask is None else attention_mask.any(2, keepdim=True)
    options |= {"scaling": layer.scaling, "dropout": layer.attention_dropout}
    out, weights = patch.attend(query + layer.bias_u[:, None], key, value, terms, mask, **options)
    return layer.o_proj(out), weights


def _distance_scores(vectors: Tensor, query: Tensor, bias: Tensor) -> OffsetKeys:
    """Return the scores of Transformer-XL's vectors of distances.

    Args:
        vectors: (1, 2 * n - 1, heads * head_dim), for queries from n - 1 tokens after a key to n - 1 before it.
        query: (batch, heads, n, head_dim).
        bias: (heads, head_dim), added to queries.
    """
    table = split_heads(vectors, query.shape[1])[0]
    return OffsetKeys(table, 1 - query.shape[2], query_factors=(query + bias[:, None]) * query.shape[3] ** -0.5)


def wavlm(
    patch: PatchedForward,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    index: int = 0,
    **options: object,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute WavLM's attention: a table over offsets, in buckets, times a gate for each query.

    The first layer passes the table (heads, offsets, 1) to the others, as the original model passes its matrix.
    """
    layer = patch.layer
    query, key, value = project_heads(hidden_states, layer.num_heads, layer.q_proj, layer.k_proj, layer.v_proj)
    table = position_bias
    if table is None:
        reach = min(hidden_states.shape[1] - 1, layer.max_distance)
        offsets = torch.arange(-reach, reach + 1, device=hidden_states.device)
        table = layer.rel_attn_embed(layer._relative_positions_bucket(offsets)).mT.unsqueeze(2)
    gates = layer.gru_rel_pos_linear(split_heads(hidden_states, layer.num_heads)).unflatten(3, (2, 4)).sum(4)
    gate_a, gate_b = gates.sigmoid().split(1, dim=3)
    gate = gate_a * (gate_b * layer.gru_rel_pos_const - 1) + 2  # (batch, heads, n, 1)
    terms = (OffsetKeys(table, -(table.shape[1] // 2), query_factors=gate),)
    mask = None if attention_mask is None else attention_mask[:, None, None] == 1
    out, weights = patch.attend(query, key, value, terms, mask, dropout=layer.dropout, **options)
    return layer.out_proj(out), weights, table
