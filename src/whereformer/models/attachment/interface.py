"""The attention function and the mask function that transformers calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from ...errors import InputError
from ...kernels import DenseBias, OffsetBias, Term, attention, attention_weights
from .hooks import NAME, LayerInput


def layer_is_causal(module: nn.Module, stated: bool | None = None) -> bool:
    """Whether attention is causal, by transformers' rule: the call's argument, else the layer's attribute."""
    return bool(getattr(module, "is_causal", True) if stated is None else stated)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
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
        attention_mask: a mask made by :func:`mask`, or by the model itself.
        scaling: the factor on query . key; head_dim ** -0.5 if None.
        dropout: the dropout probability of the attention weights.
        is_causal: whether later keys are masked; None: the layer decides.
        options: everything else that the layer passes. ``whereformer`` and ``whereformer_first`` come from our hooks,
            ``position_bias`` and ``output_attentions`` from the model.

    Returns:
        (batch, n_q, heads, head_dim), and the weights (batch, heads, n_q, n_k) if the model returns them.

    Raises:
        InputError: for a change of scores that the model asks for and this attention does not have.
    """
    check_options(options)
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    terms: tuple[Term, ...] = ()
    layer: LayerInput | None = options.get("whereformer")
    if layer is not None:
        position, place = layer.forward.position, layer.place(query.shape[2], key.shape[2])
        terms = (*position.terms(layer.hidden, place), *position.query_terms(query, place))
        query, key, value = position.rotate(query, key, value, place)
    terms += _bias_terms(options.get("position_bias"), options.get("whereformer_first"))
    causal, key_mask = layer_is_causal(module, is_causal), None
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1):
            key_mask = attention_mask[:, 0, 0].expand(len(query), key.shape[2])
        else:
            # The mask has an entry for every pair and includes causal masking.
            causal = False
            terms += (_mask_term(attention_mask, query, key.shape[2]),)
    call: dict[str, Any] = {"key_mask": key_mask, "causal": causal, "scale": scaling}
    out = attention(query, key, value, terms, dropout_p=dropout, **call)
    with_weights = options.get("output_attentions")
    if with_weights is None:
        with_weights = getattr(getattr(module, "config", None), "output_attentions", False)
    weights = attention_weights(query, key, value, terms, **call) if with_weights else None
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
    """Raise an InputError for options by which a model's attention changes the scores in its own way."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise InputError(name, f"whereformer's attention has none, got {options[name]!r}")


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
) -> Tensor | None:
    """A mask function of transformers: it returns (batch, 1, 1, n_k) for mere padding, else (batch, 1, n_q, n_k).

    Causal masking is left to the attention function, which needs no matrix for it.
    """
    if isinstance(q_offset, Tensor):
        raise InputError("past_key_values", "whereformer's attention needs a cache that grows, got a static one")
    if mask_function not in (bidirectional_mask_function, causal_mask_function):
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        return sdpa_mask(*sizes, mask_function, attention_mask, **options)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length]
    # A mask that masks nothing costs time. Only on the CPU can this be checked without waiting for the device.
    if padding.device.type == "cpu" and not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding[:, None, None]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
