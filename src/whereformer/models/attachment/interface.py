"""The attention function and the mask function that transformers calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from ...errors import InputError, shown
from ...kernels import DenseBias, OffsetBias, Term, attention, attention_and_weights
from .hooks import NAME, LayerInput
from .masks import WindowMask

Mask: TypeAlias = Tensor | WindowMask | None
"""What arrives as a mask."""


def layer_is_causal(module: nn.Module, stated: bool | None = None) -> bool:
    """Whether attention is causal, by transformers' rule: the call's argument, else the layer's attribute."""
    return bool(getattr(module, "is_causal", True) if stated is None else stated)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers, with the terms of an attached position method.

    Args:
        module: the layer that calls it.
        query: (batch, heads, n_q, head_dim).
        key, value: (batch, heads or a divisor of them, n_k, head_dim).
        attention_mask: a mask made by :func:`mask`, by a layer of :data:`KINDS`, or by the model itself.
        scaling: the factor on query . key; head_dim ** -0.5 if None.
        dropout: the dropout probability of the attention weights.
        is_causal: whether later keys are masked; None: the layer decides.
        options: everything else that the layer passes. ``whereformer`` and ``whereformer_first`` come from our hooks,
            ``whereformer_terms`` from a layer of :data:`KINDS`, ``position_bias``, ``softcap`` (Gemma 2), ``s_aux``
            (the sinks of GPT-OSS) and ``output_attentions`` from the model. Windows come with the mask, so
            ``sliding_window`` is not read.

    Returns:
        (batch, n_q, heads, head_dim), and the weights (batch, heads, n_q, n_k) if the model returns them.

    Raises:
        InputError: for keys that the model chooses itself, which this attention cannot do.
    """
    check_options(options)
    terms: tuple[Term, ...] = ()
    limits, mask_terms = _limits(attention_mask, query, key.shape[2])
    layer: LayerInput | None = options.get("whereformer")
    if layer is not None:
        position = layer.forward.position
        place = layer.place(query.shape[2], key.shape[2], limits.get("key_mask"), scaling)
        query, key, value, terms = position("act", layer.hidden, query, key, value, place)
    terms += options.get("whereformer_terms", ())
    terms += _bias_terms(options.get("position_bias"), options.get("whereformer_first"))
    call: dict[str, Any] = {
        "causal": layer_is_causal(module, is_causal),
        "scale": scaling,
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
    }
    call, terms = call | limits | {"dropout_p": dropout}, terms + mask_terms
    with_weights = options.get("output_attentions", None if layer is None else layer.with_weights)
    if with_weights is None:
        with_weights = getattr(getattr(module, "config", None), "output_attentions", False)
    weights = None
    if with_weights:
        out, weights = attention_and_weights(query, key, value, terms, **call)
    else:
        out = attention(query, key, value, terms, **call)
    return out.transpose(1, 2).contiguous(), weights


def _bias_terms(bias: Tensor | None, first: int | None) -> tuple[Term, ...]:
    """Turn T5's biases into a term: a table (1, heads, 1, offsets) from the offset ``first`` on, or one per pair."""
    if bias is None:
        return ()
    if first is None:
        return (DenseBias(bias),)
    # A table with one offset means that the layer has no biases.
    return (OffsetBias(bias[0, :, 0], first),) if bias.shape[3] > 1 else ()


def check_options(options: dict[str, Any]) -> None:
    """Raise an InputError for options by which a model's attention chooses the keys of each query in its own way."""
    for name in ("indices", "block_indices"):
        if options.get(name) is not None:
            raise InputError(name, f"whereformer's attention chooses no keys, got {shown(options[name])}")


def _limits(mask: Mask, query: Tensor, n_k: int) -> tuple[dict[str, Any], tuple[Term, ...]]:
    """Return how a mask limits attention: options of the call, and terms."""
    if mask is None:
        return {}, ()
    if isinstance(mask, WindowMask):
        if mask.n_k != n_k:
            raise InputError("attention_mask", f"expected the {mask.n_k} keys that the window is over, got {n_k}")
        options, terms = _limits(mask.padding, query, n_k)
        return {**options, "window": (mask.before, mask.after), "causal": False}, terms
    if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1):
        # It has an entry for every pair and includes causal masking.
        return {"causal": False}, (_mask_term(mask, query, n_k),)
    return {"key_mask": mask[:, 0, 0].expand(query.shape[0], n_k)}, ()


def _mask_term(mask: Tensor, query: Tensor, n_k: int) -> DenseBias:
    """Turn a mask (1 or batch, 1 or heads, n_q, n_k), bool or additive, into a term."""
    if mask.dim() != 4:
        raise InputError("attention_mask", f"expected (batch, 1, n_q, n_k), got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return DenseBias(mask.expand(-1, query.shape[1], query.shape[2], n_k))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | WindowMask | None:
    """A mask function of transformers: it returns (batch, 1, 1, n_k) for mere padding, else (batch, 1, n_q, n_k).

    Causal masking is left to the attention function, which needs no matrix for it. Nor does it need one for a sliding
    window, which becomes a :class:`WindowMask`.
    """
    if isinstance(q_offset, Tensor):
        raise InputError("past_key_values", "whereformer's attention needs a cache that grows, got a static one")
    window = None
    if mask_function not in (bidirectional_mask_function, causal_mask_function):
        window = _window(mask_function, options.get("local_size"))
        # The attention function takes the last query to be at the last key.
        if window is None or q_offset + q_length != kv_offset + kv_length:
            sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
            return sdpa_mask(*sizes, mask_function, attention_mask, **options)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        # A mask that masks nothing costs time. Only on the CPU can this be checked without waiting for the device.
        if padding.device.type == "cpu" and not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
    padding = None if padding is None else padding[:, None, None]
    if window is not None and window[0] < kv_length - 1:
        return WindowMask(*window, kv_length, padding)
    return padding


def _window(mask_function: Callable[..., Tensor], size: int | None) -> tuple[int, int] | None:
    """Return how far before and after it a query attends, if the mask is a sliding window of this size and no more."""
    # A compiler cannot look into functions.
    if size is None or torch.compiler.is_compiling():
        return None
    if _are_same(mask_function, sliding_window_causal_mask_function(size)):
        return size - 1, 0
    if _are_same(mask_function, sliding_window_bidirectional_mask_function(size)):
        return size, size
    return None


def _are_same(one: Any, other: Any) -> bool:
    """Whether two functions have the same code and were made from the same functions and numbers."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        made_from = (tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (one, other))
        return one.__code__ is other.__code__ and _are_same(*made_from)
    return one is other or (type(one) is type(other) is int and one == other)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
