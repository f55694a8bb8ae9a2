"""The attention function that transformers calls in place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...errors import InputError, shown
from ...kernels import DenseBias, OffsetBias, Term, attention, attention_and_weights, varlen
from .hooks import NAME, LayerInput
from .masks import RequestedMask, mask

Mask: TypeAlias = Tensor | RequestedMask | None
"""What arrives as a mask."""

COMPUTED = frozenset({
    "cu_seq_lens_k", "cu_seq_lens_q", "output_attentions", "position_bias", "s_aux", "seq_idx", "sinks", "softcap",
    "whereformer", "whereformer_first", "whereformer_forward", "whereformer_terms",
})  # fmt: skip
"""The options that attention computes with."""

HARMLESS = frozenset({
    "cache", "cache_position", "decoder_input_ids", "deterministic", "input_ids", "labels", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_ids", "return_dict", "sliding_window", "token_type_ids", "use_cache",
})  # fmt: skip
"""The options that change no score: no attention function of transformers reads them, or they come with the mask."""


def check_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise an InputError for an option of a layer's attention that might change scores, and that we do not know."""
    for name, given in options.items():
        if given is not None and name not in COMPUTED and name not in HARMLESS:
            got = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else shown(given)
            raise InputError(name, f"whereformer's attention does not know it, got {got} from {type(module).__name__}")


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
        is_causal: without a mask, whether later keys are masked; None: the layer decides.
        options: everything else that the layer passes. ``whereformer`` and ``whereformer_first`` come from our hooks,
            ``whereformer_terms`` from a layer of :data:`KINDS`, ``position_bias``, ``softcap`` (Gemma 2), ``s_aux``
            (the sinks of GPT-OSS, one a head) or ``sinks`` (those of Inkling 2, one a query), ``cu_seq_lens_q`` or
            ``seq_idx`` (the texts of packed rows) and ``output_attentions`` from the model. Windows come with the mask,
            so ``sliding_window`` is not read.

    Returns:
        (batch, n_q, heads, head_dim), and the weights (batch, heads, n_q, n_k) if the model returns them.

    Raises:
        InputError: for an option that might change scores and is not known, such as keys that the model chooses.
    """
    check_options(module, options)
    asked = requested(module, attention_mask, query, key, is_causal, options)
    terms: tuple[Term, ...] = ()
    layer: LayerInput | None = options.get("whereformer")
    site = asked.site(query, scaling)
    if layer is not None:
        layer.check(asked, query.shape[2])
        position, new_key = layer.forward.position, None if layer.cache is None else layer.cache.new_key
        if new_key is not None:
            site = replace(site, new_key_positions=site.query_positions)
        layer_site = replace(layer.forward.prepare_for(asked, site), layer=layer.layer)
        keys = key if new_key is None else new_key
        query, keys, value, terms = position.apply_hooks(layer.hidden, query, keys, value, layer_site)  # type: ignore[assignment]  # attached methods keep query . key
        if new_key is None:  # if there are new keys, the cache has rotated them, and ``key`` has all keys
            key = keys
    terms += options.get("whereformer_terms", ())
    terms += _bias_terms(options.get("position_bias"), options.get("whereformer_first"))
    if asked.matrix is not None:
        terms += (_mask_term(asked.matrix, query, asked.n_k),)
    call: dict[str, Any] = {
        **site.options(query),
        "softcap": options.get("softcap"),
        "sinks": _sinks(options),
        "dropout_p": dropout,
    }
    weights = None
    if options.get("output_attentions", None if layer is None else layer.with_weights):
        out, weights = attention_and_weights(query, key, value, terms, **call)
    else:
        out = attention(query, key, value, terms, **call)
    return out.transpose(1, 2).contiguous(), weights


def requested(
    module: nn.Module, mask: Mask, query: Tensor, key: Tensor, is_causal: bool | None, options: Mapping[str, Any]
) -> RequestedMask:
    """Return what limits the attention of a layer, whatever arrives as its mask; the arguments are :func:`attend`'s.

    Without a mask, transformers' rule counts: the call's argument says whether attention is causal, else the layer's
    attribute. A mask of the model's own is all that limits its attention.
    """
    n_k = key.shape[2]
    if mask is None:
        asked = RequestedMask(n_k, causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
    elif isinstance(mask, RequestedMask):
        asked = mask
        if asked.n_k != n_k:
            raise InputError("attention_mask", f"expected the {asked.n_k} keys that the model asked for, got {n_k}")
    elif mask.dim() != 4:
        raise InputError("attention_mask", f"expected (batch, 1, n_q, n_k), got {tuple(mask.shape)}")
    elif mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        asked = RequestedMask(n_k, real=mask[:, 0, 0])
    else:
        asked = RequestedMask(n_k, matrix=mask)
    layer: LayerInput | None = options.get("whereformer")
    documents = (layer.forward if layer else varlen).packed_document_ids(options, query, query.shape[2], n_k)
    return asked if documents is None else asked._replace(documents=documents)


def _bias_terms(bias: Tensor | None, first: int | None) -> tuple[Term, ...]:
    """Turn T5's biases into a term: a table (1, heads, 1, offsets) from the offset ``first`` on, or one per pair."""
    if bias is None:
        return ()
    if first is None:
        return (DenseBias(bias),)
    # A table with one offset means that the layer has no biases.
    return (OffsetBias(bias[0, :, 0], first),) if bias.shape[3] > 1 else ()


def _sinks(options: Mapping[str, Any]) -> Tensor | None:
    """Return one logit a head, (heads,), or one a query, (batch, heads, n_q), which arrives as a column of scores."""
    given: Tensor | None = options.get("s_aux")
    if given is None:
        given = options.get("sinks")
    return given.squeeze(-1) if given is not None and given.dim() == 4 else given


def _mask_term(mask: Tensor, query: Tensor, n_k: int) -> DenseBias:
    """Turn a mask (1 or batch, 1 or heads, n_q, n_k), bool or additive, into a term."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return DenseBias(mask.expand(-1, query.shape[1], query.shape[2], n_k))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
