"""The "reference" backend: the definition of correct, with every term written out on the full (n_q, n_k) grid.

:func:`attention_scores` computes the scores of the equation in kernels/call.py, :func:`softmax` the weights and
:func:`attend` the output. The code is deliberately simple. It computes bfloat16 and float16 input in float32 and casts
back at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .call import TABLES, Call, LogSums
from .dropout import keep_mask
from .precision import without_autocast
from .tracing import can_read


def attend(
    call: Call, sinks: Tensor | None = None, survives: Tensor | None = None
) -> tuple[Tensor, LogSums | None, Tensor]:
    """Compute attention.

    Args:
        sinks: (heads,) or (batch, heads, n_q), a logit per row that takes part in the softmax; None without any.
        survives: which weights survive dropout, bool (batch, heads, n_q, n_k). If None, the call's seed decides.

    Returns:
        The output, (batch, heads, n_q, value_dim) in the value's dtype; ``LogSums`` if the call needs them; and the
        weights before dropout.
    """
    with without_autocast(call.value.device):
        call = call.widen(TABLES)
        weights, lse = softmax(call, sinks)
        if (seeds := call.dropout_seeds()) is not None:
            survives = keep_mask(seeds, torch.arange(call.n_k, device=call.value.device), call.dropout_p)
        dropped = weights if survives is None else weights.masked_fill(~survives, 0.0) / (1.0 - call.dropout_p)
        out = dropped @ _for_each_head(call, call.value).to(dropped.dtype)
        if call.value_table is not None:
            # Sum the attention of row i at each offset of the table, then multiply the sums with the table.
            columns = read_columns(call, "value_table").unsqueeze(1)
            offset_sums = dropped.new_zeros(*dropped.shape[:3], call.value_table.shape[1])  # (batch, heads, n_q, T)
            offset_sums = offset_sums.scatter_add(-1, columns.expand_as(dropped), dropped)
            out = out + _times(offset_sums, call.value_table.mT)
        return out.to(call.value.dtype), lse, weights


def softmax(call: Call, sinks: Tensor | None) -> tuple[Tensor, LogSums | None]:
    """Return the weights before dropout, (batch, heads, n_q, n_k), in float32 or wider, and ``LogSums`` if needed.

    A pair that may not attend has weight 0, even in a row where no pair may attend: that row is all zeros.
    """
    scores, allowed = attention_scores(call)
    empty = None
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        # A sink is one more key, whose value is 0.
        sinks = sinks.view(-1, 1) if sinks.dim() == 1 else sinks
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(scores.shape[:3]).unsqueeze(-1)], -1)
    if allowed is not None or sinks is not None or _may_forbid(call.bias) or _may_forbid(call.dense):
        # A row that may not attend to anything has no softmax. Its scores are replaced by zeros, so that no NaN comes
        # up, and its weights are masked below.
        empty = scores.isneginf().all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
    weights = scores.softmax(-1)
    lse = None
    if call.wants_lse:
        largest = (
            scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
        )
        log_sums = (scores - largest).logsumexp(-1)
        if empty is not None:
            largest, log_sums = largest.masked_fill(empty, -torch.inf), log_sums.masked_fill(empty.squeeze(-1), 0.0)
        lse = torch.stack([largest.squeeze(-1), log_sums])
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    return weights if sinks is None else weights[..., :-1], lse


def _may_forbid(bias: Tensor | None) -> bool:
    """Whether a bias may add -inf to some pairs."""
    return bias is not None and (not can_read(bias) or bool(bias.isneginf().any()))


def attention_scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Compute the scores, (batch, heads, n_q, n_k), in float32 or wider; and which pairs may attend, None if all."""
    call, dtype = call.widen(TABLES), call.score_dtype
    batch, _, n_k, _ = call.value.shape
    query = None if call.query is None else call.query.to(dtype) * call.scale
    if query is not None and call.key is not None:
        scores = query @ _for_each_head(call, call.key).to(dtype).mT
        if call.softcap is not None:
            scores = (scores / call.softcap).tanh() * call.softcap
    else:
        scores = torch.zeros((), dtype=dtype, device=call.value.device).expand(batch, call.heads, call.n_q, n_k)
    if call.bias is not None:
        biases = call.bias[:, read_columns(call, "bias")]  # (heads, 1 or batch, n_q, n_k)
        scores = scores + biases.transpose(0, 1)
    if call.key_table is not None:
        rows = query if call.key_table_factors is None else call.key_table_factors
        assert rows is not None
        columns = read_columns(call, "key_table").unsqueeze(1).expand_as(scores)
        scores = scores + _times(rows, call.key_table).expand(batch, -1, -1, -1).gather(-1, columns)
    if call.query_table is not None:
        scores = scores + query_table_scores(call, call.query_table, read_columns(call, "query_table"))
    if call.query_factors is not None and call.key_factors is not None:
        scores = scores + call.query_factors.to(dtype) @ call.key_factors.to(dtype).mT
    if call.query_levels is not None and call.key_levels is not None:
        for query_level, key_level in zip(call.query_levels.unbind(-1), call.key_levels.unbind(-1), strict=True):
            scores = scores - (query_level[..., None] - key_level[..., None, :]).abs()
    if call.dense is not None:
        scores = scores + call.dense.to(dtype)
    return scores, call.allowed_pairs()


def query_table_scores(call: Call, table: Tensor, columns: Tensor) -> Tensor:
    """Return the scores that a table of queries adds, (1 or batch, heads, n_q, n_k).

    Args:
        columns: the column of ``table`` that each pair reads, (1 or batch, n_q, n_k).
    """
    rows = call.query_table_factors
    if rows is None:
        assert call.key is not None
        rows = _for_each_head(call, call.key).to(table.dtype) * call.scale
    per_offset = _times(rows, table)  # (1 or batch, heads, n_k, T)
    # Not by len(), which makes a size of exported programs a number.
    batch = per_offset.shape[0] if columns.shape[0] == 1 else columns.shape[0]
    columns = columns.mT.unsqueeze(1).expand(batch, per_offset.shape[1], -1, -1)
    return per_offset.expand(batch, -1, -1, -1).gather(-1, columns).mT


def _for_each_head(call: Call, rows: Tensor) -> Tensor:
    """Repeat keys or values, (batch, key heads, n_k, dim), to one per query head."""
    heads = rows.shape[1]
    return rows if call.heads == heads else rows.repeat_interleave(call.heads // heads, 1)


def _times(rows: Tensor, table: Tensor) -> Tensor:
    """Multiply rows (batch, heads, n, dim) with their heads' vectors (heads or 1, T, dim): (batch, heads, n, T)."""
    if table.shape[0] > 1:
        return rows @ table.mT
    # A table that heads share needs one product instead of one per item and head, and so does its gradient. A token's
    # heads are usually next to each other in the memory of queries.
    return functional.linear(rows.transpose(1, 2), table[0]).transpose(1, 2)


def read_columns(call: Call, name: str) -> Tensor:
    """Return the column of a table that each pair reads, (1 or batch, n_q, n_k)."""
    table: Tensor = getattr(call, name)
    return (call.offsets() - call.first[TABLES.index(name)]).clamp(0, table.shape[1] - 1)
