"""Sequences of different lengths without padding, as packed documents.

Query i of a packed row attends only to the keys j with ``document_j = document_i``, and offsets are between positions
within the document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import short_repr
from .make_call import FLOATING, INTEGER, NUMBERS, check_tensor, check_terms
from .terms import TABLES, Term
from .tracing import can_read


def pack_sequences(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    terms: Sequence[Term],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    options: Mapping[str, object],
    affine: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, tuple[Term, ...], dict[str, Any]]:
    """Check arguments of :func:`whereformer.attention_varlen`, and pack its sequences into one row of documents.

    Args:
        affine: whether documents may have the affine positions of the row if offsets stay the same, which Triton's
            kernels do not load. Other backends keep the order of their sums only with positions within documents.

    Returns:
        Query, key, value, terms and options for :func:`whereformer.attention`. Unpack its output by ``unpack_output``.

    Raises:
        TypeError, ValueError: if the sequences do not fit the tensors.
    """
    query, key = (None if rows is None else _pack_rows(name, rows) for name, rows in (("query", query), ("key", key)))
    value = _pack_rows("value", value)
    n_q, n_k = (value if query is None else query).shape[2], value.shape[2]
    terms = check_terms(terms)
    for term in terms:
        if isinstance(term, TABLES) and term.step != 1:
            raise ValueError(f"{type(term).__name__}.step: expected 1 for sequences without padding, got {term.step}")
    options = dict(options)
    for name, axis, n in (("query_positions", "total_q", n_q), ("key_positions", "total_k", n_k)):
        if (positions := options.get(name)) is not None:
            check_tensor(name, positions, NUMBERS, {axis: n})
    if isinstance(sinks := options.get("sinks"), Tensor) and sinks.dim() == 2:
        options["sinks"] = sinks.mT.unsqueeze(0)
    affine = affine and (cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q)
    if cu_seqlens_k is None:
        if n_q != n_k:
            raise ValueError(f"cu_seqlens_k: needed, because query has {n_q} rows and value has {n_k}")
        cu_seqlens_k = cu_seqlens_q
    check_seqlens("cu_seqlens_q", cu_seqlens_q, "query", n_q, value)
    check_seqlens("cu_seqlens_k", cu_seqlens_k, "value", n_k, value)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k: expected {len(cu_seqlens_q)} numbers as cu_seqlens_q has, got {len(cu_seqlens_k)}"
        )
    start_q, start_k = cu_seqlens_q.to(torch.int64), cu_seqlens_k.to(torch.int64)
    query_rows, key_rows = (torch.arange(n, device=value.device) for n in (n_q, n_k))
    query_ids, key_ids = find_sequences(query_rows, start_q), find_sequences(key_rows, start_k)
    query_positions, key_positions = options.get("query_positions"), options.get("key_positions")
    if not affine or query_positions is not None or key_positions is not None:
        # The last query has the position of the last key.
        last = start_k[query_ids + 1] - start_k[query_ids] - start_q[query_ids + 1]
        options["query_positions"] = query_rows + last if query_positions is None else query_positions
        options["key_positions"] = key_rows - start_k[key_ids] if key_positions is None else key_positions
    options |= {"query_documents": query_ids.unsqueeze(0), "key_documents": key_ids.unsqueeze(0)}
    return query, key, value, terms, options


def unpack_output(output: Tensor) -> Tensor:
    """Return an output or log-sum-exp, (1, heads, n, ...), as rows one after another, (total, heads, ...)."""
    return output.squeeze(0).transpose(0, 1)


def find_sequences(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the index of each row's sequence: the number of sequences that end before the row."""
    # Unchecked numbers on a device may be wrong, but must not lead to an index that does not exist.
    return torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp(max=len(cu_seqlens) - 2)


def _pack_rows(name: str, rows: Tensor) -> Tensor:
    """Return (total, heads, dim) as (1, heads, total, dim)."""
    check_tensor(name, rows, FLOATING, dict.fromkeys(("total tokens", "heads", "head_dim")))
    return rows.transpose(0, 1).unsqueeze(0)


def check_seqlens(name: str, cu_seqlens: Any, of: str, total: int, value: Tensor) -> None:
    """Check where sequences begin, unless reading that would stall a device."""
    check_tensor(name, cu_seqlens, INTEGER, {"number of sequences + 1": None}, device=value.device)
    if can_read(cu_seqlens) and (
        (starts := cu_seqlens.tolist()) != sorted(starts) or starts[:1] + starts[-1:] != [0, total]
    ):
        raise ValueError(
            f"{name}: expected non-decreasing integers from 0 to {total} (the rows of {of}), got {short_repr(starts)}"
        )
