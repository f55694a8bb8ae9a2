"""DeBERTa, versions 1 to 3: the content of queries with positions of keys, and of keys with positions of queries."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ....errors import InputError
from ....kernels import OffsetKeys, OffsetQueries, Term
from ...packed import PACKED
from ..served import Served
from .heads import project_heads, split_heads


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
    scale = _scale(query, 1 + len(layer.pos_att_type))
    query, value = (query + bias_q) / scale, value + bias_v
    terms: tuple[Term, ...] = ()
    if layer.relative_attention:
        assert rel_embeddings is not None
        span = min(hidden_states.shape[1], layer.max_relative_positions)
        middle = layer.max_relative_positions
        vectors = layer.pos_dropout(rel_embeddings)[middle - span : middle + span]
        # Distances are those of the query from the key.
        rows = torch.arange(2 * span - 1, -1, -1, device=vectors.device)
        key_vectors = layer.pos_proj(vectors) if "c2p" in layer.pos_att_type else None
        query_vectors = layer.pos_q_proj(vectors) / scale if "p2c" in layer.pos_att_type else None
        terms = _terms(layer, rows, 1 - span, key_vectors, query_vectors)
    return _attend(own, query, key, value, terms, attention_mask, output_attentions=output_attentions, **options)


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
    kinds = {kind for kind in ("c2p", "p2c") if kind in layer.pos_att_type}
    scale = _scale(query, 1 + len(kinds))
    terms: tuple[Term, ...] = ()
    if layer.relative_attention:
        assert rel_embeddings is not None
        vectors = layer.pos_dropout(rel_embeddings)[: 2 * layer.pos_ebd_size]
        rows, first = _bucket_rows(layer, hidden_states)
        key_vectors = query_vectors = None
        if "c2p" in kinds:
            key_vectors = (layer.key_proj if layer.share_att_key else layer.pos_key_proj)(vectors)
        if "p2c" in kinds:
            query_vectors = (layer.query_proj if layer.share_att_key else layer.pos_query_proj)(vectors) / scale
        terms = _terms(layer, rows, first, key_vectors, query_vectors)
    query = query / scale
    return _attend(own, query, key, value, terms, attention_mask, output_attentions=output_attentions, **options)


def _attend(own: Served, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Attend with queries that are scaled already."""
    return own.attend(*arguments, scaling=1.0, dropout=own.layer.dropout.p, **options)


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


def _scale(query: Tensor, factor: int) -> Tensor:
    """Return what scores are divided by. The models compute it in float32, which counts in float64."""
    return torch.tensor(query.shape[3] * factor, dtype=torch.float32).sqrt().to(query.dtype)


def _bucket_rows(layer: Any, hidden: Tensor) -> tuple[Tensor, int]:
    """Return the row of the embeddings for each offset between tokens, and the first of these offsets."""
    size, furthest = layer.pos_ebd_size, layer.max_relative_positions
    reach = min(hidden.shape[1] - 1, furthest)  # farther ones read the rows at the ends
    # Distances are those of the query from the key.
    distances = torch.arange(reach, -reach - 1, -1, device=hidden.device)
    if layer.position_buckets > 0:
        buckets = sys.modules[type(layer).__module__].make_log_bucket_position
        distances = buckets(distances, layer.position_buckets, furthest).long()
    return (distances + size).clamp(0, 2 * size - 1), -reach


def _terms(
    layer: Any, rows: Tensor, first: int, key_vectors: Tensor | None, query_vectors: Tensor | None
) -> tuple[Term, ...]:
    """Return both terms, as far as there are vectors (rows, heads * head_dim); ``rows`` has the row of each offset."""

    def table(vectors: Tensor) -> Tensor:
        return split_heads(vectors[None], layer.num_attention_heads)[0].index_select(1, rows)

    terms: list[Term] = []
    if key_vectors is not None:
        terms.append(OffsetKeys(table(key_vectors), first))
    if query_vectors is not None:
        terms.append(OffsetQueries(table(query_vectors), first))
    return tuple(terms)
