"""The "reference" backend: the definition of correct, with every term written out on the full (n_q, n_k) grid.

The code is deliberately simple. It computes bfloat16 and float16 input in float32 and casts back at the end.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn import functional

from .call import Call
from .dropout import keep_mask, row_seeds
from .logsums import LogSums
from .precision import without_autocast
from .terms import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Term,
)
from .tracing import can_look


def attend(call: Call) -> tuple[Tensor, LogSums | None]:
    """Compute attention, (batch, heads, n_q, value_dim) in the value's dtype, and ``LogSums`` if the call wants it."""
    with without_autocast(call.device):
        return attend_keeping(call, _kept(call))


def attend_with_weights(call: Call) -> tuple[Tensor, Tensor]:
    """Compute :func:`attend`'s output, and the weights before dropout that it was computed from."""
    with without_autocast(call.device):
        weights, _ = _softmax(call)
        return _output(call, weights, _kept(call)), weights


def attend_keeping(call: Call, kept: Tensor | None) -> tuple[Tensor, LogSums | None]:
    """Compute :func:`attend` with the weights that dropout keeps, bool (batch, heads, n_q, n_k); None keeps all."""
    weights, lse = _softmax(call)
    return _output(call, weights, kept), lse


def _kept(call: Call) -> Tensor | None:
    """Return which weights dropout keeps, bool (batch, heads, n_q, n_k); None for all."""
    if call.seed is None:
        return None
    seeds = row_seeds(call.seed, call.value.shape[0], call.heads, call.n_q)
    return keep_mask(seeds, torch.arange(call.n_k, device=call.device), call.dropout_p)


def _output(call: Call, weights: Tensor, kept: Tensor | None) -> Tensor:
    """Return the output of attention with these weights."""
    if kept is not None:
        weights = weights.masked_fill(~kept, 0.0) / (1.0 - call.dropout_p)
    out = weights @ _for_each_head(call, call.value).to(weights.dtype)
    for term in call.terms:
        if isinstance(term, OffsetValues):
            # Sum the attention of row i at each offset of the table, then multiply the sums with the table.
            columns = columns_of(call, term).unsqueeze(1)
            at_offset = weights.new_zeros(*weights.shape[:3], term.table.shape[1])
            at_offset = at_offset.scatter_add(-1, columns.expand_as(weights), weights)
            out = out + _times(at_offset, term.table.mT.to(weights.dtype))
    return out.to(call.value.dtype)


def attention_weights(call: Call) -> Tensor:
    """Compute the softmax weights before dropout, (batch, heads, n_q, n_k), in float32 or wider.

    A pair that may not attend has weight 0, even in a row where no pair may attend: that row is all zeros.
    """
    return _softmax(call)[0]


def _softmax(call: Call) -> tuple[Tensor, LogSums | None]:
    """Return the weights, and ``LogSums`` if the call wants it."""
    scores, allowed = attention_scores(call)
    empty = None
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if call.sinks is not None:
        # A sink is one more key, whose value is 0.
        sinks = call.sinks.view(-1, 1) if call.sinks.dim() == 1 else call.sinks
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(scores.shape[:3]).unsqueeze(-1)], -1)
    if allowed is not None or call.sinks is not None or any(map(_may_forbid, call.terms)):
        # A row that may not attend to anything has no softmax; its placeholder, and the gradient of that, is masked
        # again.
        empty = scores.isneginf().all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
    weights = scores.softmax(-1)
    lse = None
    if call.return_lse:
        largest = (
            scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
        )
        log_sums = (scores - largest).logsumexp(-1)
        if empty is not None:
            largest, log_sums = largest.masked_fill(empty, -torch.inf), log_sums.masked_fill(empty.squeeze(-1), 0.0)
        lse = torch.stack([largest.squeeze(-1), log_sums])
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    return weights if call.sinks is None else weights[..., :-1], lse


def _may_forbid(term: Term) -> bool:
    """Whether a term may add -inf to some pairs."""
    if not isinstance(term, OffsetBias | DenseBias):
        return False
    found = [value for field in fields(term) if isinstance(value := getattr(term, field.name), Tensor)]
    return any(not can_look(numbers) or bool(numbers.isneginf().any()) for numbers in found)


def attention_scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Compute the scores, (batch, heads, n_q, n_k), in float32 or wider; and which pairs may attend, None if all."""
    batch, _, n_k, _ = call.value.shape
    dtype = torch.promote_types(call.value.dtype, torch.float32)
    query = None if call.query is None else call.query.to(dtype) * call.scale
    if query is not None and call.key is not None:
        scores = query @ _for_each_head(call, call.key).to(dtype).mT
        if call.softcap is not None:
            scores = (scores / call.softcap).tanh() * call.softcap
    else:
        scores = torch.zeros((), dtype=dtype, device=call.value.device).expand(batch, call.heads, call.n_q, n_k)
    for term in call.terms:
        match term:
            case OffsetBias():
                at_offset = term.table.to(dtype)[:, columns_of(call, term)]  # (heads, 1 or batch, n_q, n_k)
                scores = scores + at_offset.transpose(0, 1)
            case OffsetKeys():
                columns = columns_of(call, term).unsqueeze(1).expand_as(scores)
                scores = scores + _per_offset(term, query, dtype).expand(batch, -1, -1, -1).gather(-1, columns)
            case OffsetQueries():
                scores = scores + scores_of_queries(call, term, columns_of(call, term), dtype)
            case FactorPair():
                scores = scores + term.query_factors.to(dtype) @ term.key_factors.to(dtype).mT
            case DistanceDecay():
                scores = (
                    scores - (term.query_levels.to(dtype)[..., None] - term.key_levels.to(dtype)[..., None, :]).abs()
                )
            case DenseBias():
                scores = scores + term.scores.to(dtype)
    return scores, call.allowed()


def scores_of_queries(call: Call, term: OffsetQueries, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the term adds, (1 or batch, heads, n_q, n_k), where pairs read ``columns`` (1 or batch, n_q, n_k)."""
    key = None if call.key is None else _for_each_head(call, call.key).to(dtype) * call.scale
    per_offset = _per_offset(term, key, dtype)
    # Not by len(), which makes a size of exported programs a number.
    batch = per_offset.shape[0] if columns.shape[0] == 1 else columns.shape[0]
    columns = columns.mT.unsqueeze(1).expand(batch, per_offset.shape[1], -1, -1)
    return per_offset.expand(batch, -1, -1, -1).gather(-1, columns).mT


def _per_offset(term: OffsetKeys | OffsetQueries, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply the term's factors, or else ``rows``, with its vectors: (1 or batch, heads, n, T)."""
    rows = rows if term.factors is None else term.factors.to(dtype)
    assert rows is not None
    return _times(rows, term.table.to(dtype))


def _for_each_head(call: Call, rows: Tensor) -> Tensor:
    """Repeat keys or values, (batch, fewer heads, n_k, dim), so that every query head has its own."""
    heads = rows.shape[1]
    return rows if call.heads == heads else rows.repeat_interleave(call.heads // heads, 1)


def _times(rows: Tensor, table: Tensor) -> Tensor:
    """Multiply rows (batch, heads, n, dim) with their heads' vectors (heads or 1, T, dim): (batch, heads, n, T)."""
    if table.shape[0] > 1:
        return rows @ table.mT
    # A table that heads share needs one product instead of one per item and head, and so does its gradient. A token's
    # heads are mostly side by side in the memory of queries.
    return functional.linear(rows.transpose(1, 2), table[0]).transpose(1, 2)


def columns_of(call: Call, term: OffsetBias | OffsetKeys | OffsetQueries | OffsetValues) -> Tensor:
    """Return the column of the term's table that each pair reads, (1 or batch, n_q, n_k)."""
    return (call.offsets() - term.first).clamp(0, term.table.shape[1] - 1)
