"""Sequences of different lengths without padding, as ``attention_varlen`` takes them, as rows of packed documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .call import check_device, check_heads_tensor, check_terms
from .terms import TABLES, Term
from .tracing import can_look


def as_documents(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    terms: Sequence[Term],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    options: Mapping[str, Any],
    affine: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, tuple[Term, ...], dict[str, Any]]:
    """Check arguments of :func:`whereformer.attention_varlen` and return those of attention: query, key, value, terms
    and options of one row of documents. The output is brought back by :func:`as_rows`.

    Args:
        affine: let documents have the positions of the row where offsets are the same then, which Triton's kernels know
            without loading them. Other backends keep the order of their sums only with positions of their own.

    Raises:
        TypeError, ValueError: if the sequences do not fit the tensors, or for an option that has no meaning for them.
    """
    query, key, value = _check_content(query, key, value)
    n_q, n_k = (value if query is None else query).shape[2], value.shape[2]
    terms = check_terms(terms)
    for term in terms:
        if isinstance(term, TABLES) and term.step != 1:
            raise ValueError(f"{type(term).__name__}.step: expected 1 for sequences without padding, got {term.step}")
    options = _check_options(options, n_q, n_k)
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
    of_query, of_key = _sequence_of(query_rows, start_q), _sequence_of(key_rows, start_k)
    given = [options.get(name) for name in ("query_positions", "key_positions")]
    if not affine or any(each is not None for each in given):
        # The last query has the position of the last key.
        last = start_k[of_query + 1] - start_k[of_query] - start_q[of_query + 1]
        options["query_positions"] = query_rows + last if given[0] is None else given[0]
        options["key_positions"] = key_rows - start_k[of_key] if given[1] is None else given[1]
    options |= {"query_documents": of_query.unsqueeze(0), "key_documents": of_key.unsqueeze(0)}
    return query, key, value, terms, options


def as_rows(output: Tensor) -> Tensor:
    """Return an output or log-sum-exp, (1, heads, n, ...), as rows one after another, (total, heads, ...)."""
    return output.squeeze(0).transpose(0, 1)


def _sequence_of(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence of each row: the number of those that end before it."""
    # Numbers that nobody has read may be wrong, but must not be used as an index that does not exist.
    return torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp(max=len(cu_seqlens) - 2)


def _check_content(
    query: Tensor | None, key: Tensor | None, value: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return query, key and value, (total, heads, dim), as (1, heads, total, dim)."""
    if (query is None) != (key is None):
        raise ValueError("query and key: give both, or neither for attention without content scores")
    value = _as_one_row("value", value)
    if query is None or key is None:
        return None, None, value
    return _as_one_row("query", query), _as_one_row("key", key), value


def _as_one_row(name: str, rows: Tensor) -> Tensor:
    if not isinstance(rows, Tensor) or rows.is_nested:
        # It is refused here.
        return check_heads_tensor(name, rows)
    if rows.dim() != 3:
        raise ValueError(f"{name}: expected (total tokens, heads, head_dim), got shape {tuple(rows.shape)}")
    return check_heads_tensor(name, rows.transpose(0, 1).unsqueeze(0))


_TOLD_APART = "not taken here, because cu_seqlens tell the sequences apart"
_MEANINGLESS = {
    "key_mask": "sequences without padding have nothing to mask; leave such keys out",
    "query_documents": _TOLD_APART,
    "key_documents": _TOLD_APART,
}


def _check_options(options: Mapping[str, Any], n_q: int, n_k: int) -> dict[str, Any]:
    """Return the options with the sinks of queries, (total_q, heads), as those of one row."""
    for name, why in _MEANINGLESS.items():
        if options.get(name) is not None:
            raise ValueError(f"{name}: {why}")
    for name, total, n in (("query_positions", "total_q", n_q), ("key_positions", "total_k", n_k)):
        if (positions := options.get(name)) is None:
            continue
        if not isinstance(positions, Tensor):
            kind = type(positions).__name__
            raise TypeError(f"{name}: expected a tensor, each token's position in its sequence, got {kind}")
        if positions.shape != (n,):
            raise ValueError(f"{name}: expected shape ({total} {n},), got {tuple(positions.shape)}")
    sinks = options.get("sinks")
    if not isinstance(sinks, Tensor) or sinks.dim() == 1:
        return dict(options)
    if sinks.dim() != 2 or len(sinks) != n_q:
        raise ValueError(f"sinks: expected shape (heads,) or (total_q {n_q}, heads), got {tuple(sinks.shape)}")
    return {**options, "sinks": sinks.mT.unsqueeze(0)}


def check_seqlens(name: str, cu_seqlens: Any, of: str, total: int, value: Tensor) -> None:
    """Check where sequences begin, unless reading that would stall a device."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"{name}: expected whole numbers, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{name}: expected shape (number of sequences + 1,), got {tuple(cu_seqlens.shape)}")
    check_device(name, cu_seqlens, value)
    if not can_look(cu_seqlens):
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name}: expected 0 as its first number, got {starts[0]}")
    for start, stop in pairwise(starts):
        if stop < start:
            raise ValueError(f"{name}: expected numbers that never fall, got {stop} after {start}")
    if starts[-1] != total:
        raise ValueError(f"{name}: expected {total}, the number of rows of {of}, as its last number, got {starts[-1]}")
