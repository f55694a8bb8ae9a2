"""Conformers, models of sound: vectors of offsets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....kernels import OffsetKeys, Term
from ..served import Served
from .heads import split_heads


def conformer(
    own: Served,
    hidden_states: Tensor,
    attention_mask: Any = None,
    relative_position_embeddings: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of Wav2Vec2-BERT and Wav2Vec2-Conformer with any of their positions."""
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
    elif kind == "relative" and relative_position_embeddings is not None:
        terms = (_of_distances(layer.linear_pos(relative_position_embeddings), query, layer.pos_bias_v),)
        query = query + layer.pos_bias_u[:, None]
    out, weights = own.attend(query, key, value, terms, attention_mask, dropout=layer.dropout.p, **options)
    return layer.linear_out(out), weights


def _of_distances(vectors: Tensor, query: Tensor, bias: Tensor) -> OffsetKeys:
    """Return the scores that Transformer-XL's vectors of distances give.

    Args:
        vectors: (1, 2 * n - 1, heads * head_dim), for queries from n - 1 behind a key to n - 1 before it.
        query: (batch, heads, n, head_dim).
        bias: (heads, head_dim), which is added to queries.
    """
    table = split_heads(vectors, query.shape[1])[0]
    return OffsetKeys(table, 1 - query.shape[2], query_factors=(query + bias[:, None]) * query.shape[3] ** -0.5)
