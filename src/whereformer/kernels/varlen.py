"""Sequences of different lengths without padding, as ``attention_varlen`` and collators say, as packed documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
from .make_call import FLOATING, NUMBERS, WHOLE, check_tensor, check_terms
from .terms import TABLES, Term
from .tracing import can_look

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""The arguments by which transformers' collators say where the texts of packed rows begin."""


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
    query, key = (None if rows is None else _as_one_row(name, rows) for name, rows in (("query", query), ("key", key)))
    value = _as_one_row("value", value)
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


def _as_one_row(name: str, rows: Tensor) -> Tensor:
    """Return (total, heads, dim) as (1, heads, total, dim)."""
    check_tensor(name, rows, FLOATING, dict.fromkeys(("total tokens", "heads", "head_dim")))
    return rows.transpose(0, 1).unsqueeze(0)


def check_seqlens(name: str, cu_seqlens: Any, of: str, total: int, value: Tensor) -> None:
    """Check where sequences begin, unless reading that would stall a device."""
    check_tensor(name, cu_seqlens, WHOLE, {"number of sequences + 1": None}, device=value.device)
    if can_look(cu_seqlens) and (
        (starts := cu_seqlens.tolist()) != sorted(starts) or starts[:1] + starts[-1:] != [0, total]
    ):
        raise ValueError(
            f"{name}: expected numbers from 0 to {total}, the rows of {of}, that never fall, got {shown(starts)}"
        )


def packed_texts(inputs: Mapping[str, Any], like: Tensor, n_q: int, n_k: int) -> Tensor | None:
    """Return the number of each token's text, (batch, n), by what collators say of packed rows; None without any.

    Args:
        inputs: may hold ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (texts + 1,) each, where the texts of one row begin
            and the last one ends, and ``seq_idx``, (batch, n), a number for each text.
        like: a tensor of the batch, (batch, ...), on its device.
        n_q, n_k: the number of queries and keys.

    Raises:
        InputError, TypeError, ValueError: unless they fit the tokens and one another, as far as looking is cheap.
    """
    ends, of_keys, told = (inputs.get(name) for name in PACKED)
    if told is not None:
        check_tensor("seq_idx", told, WHOLE, {"batch": None, "n": None})
    if ends is None and of_keys is not None:
        raise InputError("cu_seq_lens_k", "expected cu_seq_lens_q too, got None")
    texts = told
    if ends is not None:
        check_seqlens("cu_seq_lens_q", ends, "input_ids", n_k, like)
        texts = _sequence_of(torch.arange(n_k, device=ends.device), ends)[None]
        if of_keys is not None and of_keys is not ends and can_look(ends) and not torch.equal(ends, of_keys):
            raise InputError("cu_seq_lens_k", f"expected those of the queries, got {shown(of_keys)}")
        if told is not None and can_look(told) and not torch.equal(told.diff() != 0, texts.diff() != 0):
            raise InputError("seq_idx", "expected the texts of cu_seq_lens_q, got others")
    if texts is not None and (n_q != n_k or texts.shape != (len(like), n_k)):
        name, expected = ("seq_idx", "(batch, n)") if ends is None else ("cu_seq_lens_q", "one row")
        raise InputError(name, f"it needs {expected} and no cache, got {len(like)} rows, {n_q} queries and {n_k} keys")
    return texts
