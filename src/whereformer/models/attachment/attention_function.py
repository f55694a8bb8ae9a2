"""The attention function that transformers calls instead of its builtin functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...errors import InputError, short_repr
from ...kernels import DenseBias, OffsetBias, Term, attention, attention_and_weights
from ..inputs import packed_document_ids
from .hooks import NAME, LayerInput
from .masks import Mask, MaskSpec, make_mask_spec

HANDLED_OPTIONS = frozenset({
    "cu_seq_lens_k", "cu_seq_lens_q", "output_attentions", "position_bias", "s_aux", "seq_idx", "sinks", "softcap",
    "whereformer", "whereformer_first", "whereformer_forward", "whereformer_terms",
})  # fmt: skip
"""The options that the attention function supports."""

IGNORED_OPTIONS = frozenset({
    "cache", "cache_position", "decoder_input_ids", "deterministic", "input_ids", "labels", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_ids", "return_dict", "sliding_window", "token_type_ids", "use_cache",
})  # fmt: skip
"""The options that do not change scores: transformers' attention functions do not read them, or the mask has them."""


def check_options(module: nn.Module, options: Mapping[str, object]) -> None:
    """Raise an InputError for an option of a layer's attention that we do not know, since it might change scores."""
    for name, value in options.items():
        if value is not None and name not in HANDLED_OPTIONS and name not in IGNORED_OPTIONS:
            text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else short_repr(value)
            kind = type(module).__name__
            reason = f"not supported by whereformer's attention, and may change scores; {kind} passed {text}"
            raise InputError(name, reason)


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
        key, value: (batch, key_heads, n_k, head_dim); key_heads divides heads.
        attention_mask: a mask made by :func:`make_mask_spec`, by a patch of :data:`PATCHES`, or by the model itself.
        scaling: the factor on query . key; head_dim ** -0.5 if None.
        dropout: the dropout probability of the attention weights.
        is_causal: whether later keys are masked without a mask; None: as the layer's attribute says.
        options: all other arguments of the layer. ``whereformer`` and ``whereformer_first`` come from our hooks,
            ``whereformer_terms`` from a patch of :data:`PATCHES`. These come from the model: ``position_bias``,
            ``softcap`` (Gemma 2), ``s_aux`` (GPT-OSS: one sink per head), ``sinks`` (Inkling 2: one sink per query),
            ``cu_seq_lens_q`` or ``seq_idx`` (the texts of packed rows) and ``output_attentions``. The mask describes
            windows, so ``sliding_window`` is not read.

    Returns:
        (batch, n_q, heads, head_dim), and the weights (batch, heads, n_q, n_k) if the model returns them.

    Raises:
        InputError: for an unknown option, which might change scores, such as keys that the model chooses.
    """
    check_options(module, options)
    mask_spec = mask_spec_for(module, attention_mask, query, key, is_causal, options)
    terms: tuple[Term, ...] = ()
    layer: LayerInput | None = options.get("whereformer")
    if layer is None:
        site = mask_spec.site(query, scaling)
    else:
        position, new_key = layer.forward.position, None if layer.cache is None else layer.cache.new_key
        site, hooks_site = layer.forward.get_sites(mask_spec, query, scaling, new_key is not None)
        keys = key if new_key is None else new_key
        hooks_site = hooks_site.at_layer(layer.layer)
        query, keys, value, terms = position.apply_hooks(layer.hidden, query, keys, value, hooks_site)  # type: ignore[assignment]  # attached methods keep query . key
        if new_key is None:  # otherwise, the cache has rotated the new keys, and ``key`` has all keys
            key = keys
    terms += options.get("whereformer_terms", ())
    terms += _bias_terms(options.get("position_bias"), options.get("whereformer_first"))
    if mask_spec.matrix is not None:
        terms += (_mask_term(mask_spec.matrix, query, mask_spec.n_k),)
    arguments: dict[str, Any] = {
        **site.options(query),
        "softcap": options.get("softcap"),
        "sinks": _sinks(options),
        "dropout_p": dropout,
    }
    weights = None
    if options.get("output_attentions", None if layer is None else layer.output_attentions):
        out, weights = attention_and_weights(query, key, value, terms, **arguments)
    else:
        out = attention(query, key, value, terms, **arguments)
    return out.transpose(1, 2).contiguous(), weights


def mask_spec_for(
    module: nn.Module, mask: Mask, query: Tensor, key: Tensor, is_causal: bool | None, options: Mapping[str, Any]
) -> MaskSpec:
    """Return a layer's mask as a :class:`MaskSpec`; the arguments are :func:`attend`'s.

    Without a mask, attention is causal by transformers' rule: as the call's argument says, or else the layer's
    attribute. If the model makes the mask itself, nothing else limits attention.
    """
    n_k = key.shape[2]
    if mask is None:
        mask_spec = MaskSpec(n_k, causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
    elif isinstance(mask, MaskSpec):
        mask_spec = mask
        if mask_spec.n_k != n_k:
            raise InputError("attention_mask", f"expected {mask_spec.n_k} keys, as the mask has, got {n_k}")
    elif mask.dim() != 4:
        raise InputError("attention_mask", f"expected (batch, 1, n_q, n_k), got {tuple(mask.shape)}")
    elif mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        mask_spec = MaskSpec(n_k, token_mask=mask[:, 0, 0])
    else:
        mask_spec = MaskSpec(n_k, matrix=mask)
    layer: LayerInput | None = options.get("whereformer")
    find_documents = layer.forward.packed_document_ids if layer else packed_document_ids
    documents = find_documents(options, query, query.shape[2], n_k)
    return mask_spec if documents is None else replace(mask_spec, documents=documents)


def _bias_terms(bias: Tensor | None, first: int | None) -> tuple[Term, ...]:
    """Turn T5's biases into a term.

    They are a table (1, heads, 1, offsets) that begins at the offset ``first``, or if it is None, one bias per pair.
    """
    if bias is None:
        return ()
    if first is None:
        return (DenseBias(bias),)
    # A table with one offset means that the layer has no biases.
    return (OffsetBias(bias[0, :, 0], first),) if bias.shape[3] > 1 else ()


def _sinks(options: Mapping[str, Any]) -> Tensor | None:
    """Return one logit per head, (heads,), or per query, (batch, heads, n_q); the option has the latter as a column."""
    sinks: Tensor | None = options.get("s_aux")
    if sinks is None:
        sinks = options.get("sinks")
    return sinks.squeeze(-1) if sinks is not None and sinks.dim() == 4 else sinks


def _mask_term(mask: Tensor, query: Tensor, n_k: int) -> DenseBias:
    """Turn a mask (1 or batch, 1 or heads, n_q, n_k), bool or additive, into a term."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return DenseBias(mask.expand(-1, query.shape[1], query.shape[2], n_k))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask_spec)
