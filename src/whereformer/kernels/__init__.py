"""The function ``attention``: softmax attention that takes *descriptions* of position instead of n x n matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from ..errors import suggest
from . import reference, sdpa, varlen
from .backend_choice import OPERATORS, BackendChoice, choose_backend, explain_choice
from .bounded_cache import remember
from .call import Call
from .dropout import draw_seed
from .make_call import CallOptions, SequenceOptions, make_call, show_options
from .plan_cache import StepRecorder, attend_from_cache, make_signature
from .sinks import add_sinks
from .terms import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
    PositionsLike,
    Term,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

__all__ = [
    "BackendChoice", "DenseBias", "DistanceDecay", "FactorPair", "OffsetBias", "OffsetKeys", "OffsetQueries",
    "OffsetValues", "Positions", "PositionsLike", "Term", "attention", "attention_varlen", "attention_weights",
    "explain", "remember",
]  # fmt: skip


@show_options(CallOptions)
def attention(
    query: Float[Tensor, "batch heads n_q head_dim"] | None,
    key: Float[Tensor, "batch key_heads n_k head_dim"] | None,
    value: Float[Tensor, "batch key_heads n_k value_dim"],
    terms: Sequence[Term] = (),
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[CallOptions],
) -> Any:
    """Multi-head softmax attention with position terms.

    ``score_ij = scale * <query_i, key_j>`` plus the scores of the terms, and
    ``out_i = sum_j softmax(score)_ij value_j`` plus the vectors of :class:`OffsetValues` terms.

    Args:
        query: (batch, heads, n_q, head_dim), or None together with ``key`` for attention without content scores; n_q is
            then the length of ``query_positions``, or n_k. Query, key and value have one dtype; autocast casts tensors
            whose dtypes differ.
        key: (batch, key heads, n_k, head_dim). Keys and values may have fewer heads than queries if their number
            divides the number of query heads: neighboring query heads then share a key head ("grouped" heads), without
            a copy for each.
        value: (batch, key heads, n_k, value_dim).
        terms: the position terms; see :class:`OffsetBias` and the classes after it.
        key_mask: (batch, n_k) bool, True = may be attended.
        causal: allow only keys whose position is at most the query's.
        window: allow only keys whose position is at most this far before or after the query's: an integer for both
            sides, or a pair (before, after), where None sets no limit. Time falls with the window, unless positions are
            tensors without a regular step (on a GPU, any tensors).
        scale: the finite factor on query . key, and on products of either with the vectors of :class:`OffsetKeys` and
            :class:`OffsetQueries` without factors; ``head_dim ** -0.5`` by default. Calls without a query have neither
            ``scale`` nor ``softcap``.
        softcap: the bound of ``scale * <query, key>``, from 1e-30 to 1e30: it becomes ``softcap * tanh(. / softcap)``
            before terms add to it (Gemma 2).
        sinks: (heads,), a logit per head that takes part in the softmax but has no value, so that a query may attend
            to nothing (GPT-OSS's learned sinks); or (batch, heads, n_q), one for each query (Inkling 2). They must be
            finite, which is not checked.
        dropout_p: probability of dropping an attention weight; ``torch.manual_seed`` decides which.
        query_positions: ``Positions``, or integer or fractional positions of shape (n_q,) or (1 or batch, n_q). By
            default queries are right-aligned: query i has position n_k - n_q + i, whatever the keys' positions are.
            Fractional positions must be finite. This is checked on the CPU only; elsewhere a NaN comes neither before
            nor after any position. Integers must lie between -(2 ** 62) and 2 ** 62, which is not checked. Positions
            have no gradient (None, for every backend): they decide which pairs attend and which table entries are read.
        key_positions: the same for keys; 0 .. n_k - 1 by default.
        query_documents, key_documents: (batch, n_q) and (batch, n_k) ids for packed rows: a query attends only to keys
            of the same document.
        return_lse: return the log of each row's sum of exponentials of scores too, ``sinks`` included. To merge
            attention to several sets of keys, weight their outputs by ``softmax(lses)``.
        backend: the implementation to use. A backend that does not support the call raises an error and is never
            replaced.

            - "reference": writes everything out in (n_q, n_k) memory. It defines the correct result, and is twice
              differentiable.
            - "blockwise": the reference for some queries at a time in plain PyTorch, O(n) memory forward and backward,
              any device. It is simple rather than fast.
            - "native": the compiled kernel for the CPU, O(n) memory. Installing the package compiles it, if there is a
              compiler. It supports neither float16 nor causality and windows at fractional positions.
            - "triton": fused kernels for NVIDIA GPUs of sm_80 and above, O(n) memory.
            - "auto": "native" on the CPU, "triton" on a GPU, where they support a call, else "blockwise". Calls with a
              query but without terms, ``window``, ``softcap``, ``sinks`` and ``return_lse`` go to torch's
              ``scaled_dot_product_attention`` ("sdpa") if "native" does not support them, as on any GPU (there, packed
              rows go to "triton"), if a compiled program, a transform or a subclass of tensors is used, or if autocast
              casts the inputs. Exported programs have the "reference". :func:`explain` says which backend a call gets.

            "native" and "triton" give the same bits from run to run, gradients included. On a GPU, gradients of
            tables from "reference" and "blockwise" do so only under ``torch.use_deterministic_algorithms(True)``.
            Only "reference" has second and forward-mode derivatives and, for calls with terms, the derivatives of
            ``torch.func``; "auto" chooses it for them.

    Returns:
        (batch, heads, n_q, value_dim) in the value's dtype (under autocast, torch's own attention returns autocast's).
        A row that may not attend to anything is zeros.
        With ``return_lse`` a pair: this, and (batch, heads, n_q) in float32 or wider, -inf for a row that may not
        attend to anything.

    Raises:
        TypeError, ValueError: for wrong input; the message names the argument, its value and the accepted values.
    """
    arguments = query, key, value, return_lse, backend, *options.values()
    signature = make_signature(arguments, terms, tuple(options))
    results = None if signature is None else attend_from_cache(signature)
    if results is None:
        _check_names("attention", options)
        recorder = None if signature is None else StepRecorder(signature)
        call = make_call(query, key, value, terms, recorder, return_lse=return_lse, **options)
        output, lse = _run(call, options.get("sinks"), backend, recorder)
    else:
        output, lse = add_sinks(*results, options.get("sinks"))
    return (output, lse) if return_lse and lse is not None else output


@show_options(SequenceOptions)
def attention_varlen(
    query: Float[Tensor, "total_q heads head_dim"] | None,
    key: Float[Tensor, "total_k key_heads head_dim"] | None,
    value: Float[Tensor, "total_k key_heads value_dim"],
    terms: Sequence[Term] = (),
    *,
    cu_seqlens_q: Integer[Tensor, "ends"],
    cu_seqlens_k: Integer[Tensor, "ends"] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[SequenceOptions],
) -> Any:
    """Attention within sequences of different lengths that lie one after another, without padding.

    Args:
        query, key, value: as in :func:`attention`, with the rows of all sequences: (total_q, heads, head_dim),
            (total_k, key heads, head_dim) and (total_k, key heads, value_dim). Without a query, total_q is total_k.
        terms: the position terms; offsets count within each sequence. Factors, levels and dense scores have a batch of
            1 and rows for all total_q queries and total_k keys.
        cu_seqlens_q: (number of sequences + 1,) integers, on the value's device: sequence s has the queries from
            ``cu_seqlens_q[s]`` up to, but without, ``cu_seqlens_q[s + 1]``. Sequences may be empty. The numbers are
            checked on the CPU only; elsewhere wrong numbers give wrong results.
        cu_seqlens_k: the same for keys and values; ``cu_seqlens_q`` by default.
        return_lse, backend: as in :func:`attention`.
        options: :func:`attention`'s other keyword arguments except ``key_mask``, ``query_documents`` and
            ``key_documents``, which have no meaning here. Sinks for each query are (total_q, heads). Positions are
            tensors, (total_q,) and (total_k,), of each token's position in its sequence. By default, positions of keys
            begin at 0 in each sequence, and the last query has the position of the last key, as in ``flash_attn`` from
            version 2.1 on.

    Returns:
        (total_q, heads, value_dim), and with ``return_lse`` (total_q, heads) too, as from :func:`attention`.

    Raises:
        TypeError, ValueError: as :func:`attention`.
    """
    _check_names("attention_varlen", options, SequenceOptions.__optional_keys__)
    by_triton = backend == "triton" or (backend == "auto" and isinstance(value, Tensor) and value.device.type != "cpu")
    query, key, value, terms, packed_options = varlen.pack_sequences(
        query, key, value, terms, cu_seqlens_q, cu_seqlens_k, options, by_triton
    )
    packed_options |= {"return_lse": return_lse, "backend": backend}
    results = attention(query, key, value, terms, **packed_options)
    return tuple(map(varlen.unpack_output, results)) if isinstance(results, tuple) else varlen.unpack_output(results)


def _run(call: Call, sinks: Tensor | None, backend: str, recorder: StepRecorder | None) -> tuple[Tensor, Tensor | None]:
    """Compute a call by the requested backend; return the output, and the log-sum-exp if the call needs it.

    The ``recorder`` of a first call caches its plan. Calls of the reference have none.
    """
    chosen = choose_backend(call, backend)
    if chosen == "sdpa":
        if recorder is not None:
            recorder.cache_plan(sdpa.SdpaPlan(call), [value for value in call.arguments() if isinstance(value, Tensor)])
        return sdpa.attend(call), None
    if call.dropout_p:
        with recorder or nullcontext():
            call = replace(call, seed=draw_seed(call.value.device))
    if chosen == "reference":
        output, lse, _ = reference.attend(call, sinks)
        return add_sinks(output, lse, None)
    return add_sinks(*OPERATORS[chosen].attend(call, recorder), sinks)


@show_options(CallOptions)
def explain(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    terms: Sequence[Term] = (),
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[CallOptions],
) -> BackendChoice:
    """Return which backend :func:`attention` would use for a call, and why; ``options`` are its keyword arguments.

    >>> print(whereformer.explain(query, key, value, [whereformer.OffsetBias(table, first)]))
    native: on the CPU the compiled kernel is fastest, in O(n) memory
    """
    _check_names("explain", options)
    return explain_choice(make_call(query, key, value, terms, return_lse=return_lse, **options), backend)


_OTHER_NAMES = {
    "is_causal": "write causal=True",
    **dict.fromkeys(("attn_mask", "mask", "attention_mask"), "write key_mask=, window= or the term DenseBias"),
    "key_padding_mask": "write key_mask=~key_padding_mask",
    **dict.fromkeys(("dropout", "attn_dropout"), "write dropout_p="),
    **dict.fromkeys(("softmax_scale", "scaling"), "write scale="),
    "window_size": "write window=",
    **dict.fromkeys(("logits_soft_cap", "logit_cap"), "write softcap="),
    "alibi_slopes": "write the term DistanceDecay",
    "enable_gqa": "leave it out, since keys may always have fewer heads",
    "cu_seq_k": "write cu_seqlens_k=",
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_q", "max_k"), "leave it out, since cu_seqlens_q suffices"),
}
"""For arguments of other libraries, what to write instead."""
_NOT_PACKED = dict.fromkeys(("key_mask", "attn_mask", "mask", "attention_mask"), "sequences have no padding to mask")
"""The same for packed sequences."""


def _check_names(
    function: str, options: Mapping[str, object], known: Collection[str] = CallOptions.__optional_keys__
) -> None:
    """Raise a TypeError for an option that a function does not have. The message names the function."""
    for name in options:
        if name not in known:
            advice = _OTHER_NAMES if "key_mask" in known else _OTHER_NAMES | _NOT_PACKED
            hint = f"; {advice[name]}" if name in advice else suggest(name, known)
            raise TypeError(f"{name}: not an argument of {function}{hint}")


@show_options(CallOptions)
def attention_weights(
    query: Tensor | None, key: Tensor | None, value: Tensor, terms: Sequence[Term] = (), **options: Unpack[CallOptions]
) -> Float[Tensor, "batch heads n_q n_k"]:
    """Return the softmax weights of :func:`attention`, (batch, heads, n_q, n_k), before dropout; O(n_q n_k) memory.

    ``options`` are :func:`attention`'s keyword arguments other than ``return_lse`` and ``backend``; ``dropout_p``
    changes nothing.
    """
    _check_names("attention_weights", options)
    return attention_and_weights(query, key, value, terms, **options)[1]


def attention_and_weights(
    query: Tensor | None, key: Tensor | None, value: Tensor, terms: Sequence[Term] = (), **options: Unpack[CallOptions]
) -> tuple[Tensor, Tensor]:
    """Return the output of attention by the reference, and the weights before dropout that it is computed from.

    So a loss has gradients with respect to the weights, which methods that explain predictions need.
    """
    call = make_call(query, key, value, terms, **options)
    if call.dropout_p:
        call = replace(call, seed=draw_seed(value.device))
    output, _, weights = reference.attend(call, options.get("sinks"))
    return output, weights
