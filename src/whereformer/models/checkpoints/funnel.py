"""Translates Funnel-Transformer state dicts and configurations: between transformers', the authors' and ours.

Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..blocks import parse_blocks
from ..config import EncoderConfig

# Within a layer: our name, and transformers' name within attention or ffn. The authors' differ by prefix and layout.
_LINEAR = {
    "attention.query": "attention.q_head",
    "attention.key": "attention.k_head",
    "attention.value": "attention.v_head",
    "attention.out": "attention.post_proj",
    "up": "ffn.linear_1",
    "down": "ffn.linear_2",
}
_NORMS = {"attention_norm": "attention.layer_norm", "feed_forward_norm": "ffn.layer_norm"}
_SEGMENTS = {"attention.segments.bias": "attention.r_s_bias", "attention.segments.weight": "attention.seg_embed"}
_POSITION = {
    "content_bias": "attention.r_w_bias",
    "position_bias": "attention.r_r_bias",
    "kernel": "attention.r_kernel",
}
_AUTHORS = {"ffn.linear_1": "pffn.0", "ffn.linear_2": "pffn.3"}


def funnel_config(config: Mapping[str, Any], *, decoder: bool = True) -> dict[str, Any]:
    """Translate a ``FunnelConfig`` of transformers into arguments of :class:`EncoderConfig`.

    ``decoder`` says whether the model has the decoder that the configuration describes.

    Raises:
        ValueError: for an option that has no counterpart.
    """
    sizes = config["block_sizes"]
    repeats = config.get("block_repeats") or [1] * len(sizes)
    decoder_layers = config.get("num_decoder_layers", 2) if decoder else 0
    if decoder and not (len(sizes) > 1 and repeats[0] == 1 and decoder_layers):
        # In these cases transformers adds the states of an earlier pass, adds the last states to themselves, or runs no
        # layer after.
        raise InputError(
            "block_sizes",
            "expected a decoder to have layers, and before it several blocks of which the first does not "
            f"repeat, got block_sizes {sizes}, block_repeats {repeats} and num_decoder_layers {decoder_layers} in the "
            "checkpoint's configuration",
        )
    blocks = "-".join(f"{size}x{times}" if times > 1 else str(size) for size, times in zip(sizes, repeats, strict=True))
    pooling = config.get("pooling_type", "mean")
    if pooling not in ("mean", "max"):
        raise InputError("pooling_type", f"expected mean or max, got {pooling!r}")
    activation = config.get("hidden_act", "gelu_new")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "num_attention_heads": config["n_head"],
        "head_dim": config["d_head"],
        "intermediate_size": config["d_inner"],
        "blocks": blocks,
        "decoder_layers": str(decoder_layers),
        "pooling": pooling,
        "pool_query_only": config.get("pool_q_only", True),
        "separate_cls": config.get("separate_cls", True),
        "truncate_seq": config.get("truncate_seq", True),
        "position": "transformer_xl",
        "position_options": {"form": "factorized" if config.get("attention_type") == "factorized" else "shifted"},
        # This is the same function, fused.
        "hidden_act": {"gelu_new": "gelu_pytorch_tanh"}.get(activation, activation),
        "query_bias": False,
        "hidden_dropout_prob": config.get("hidden_dropout", 0.1),
        "attention_probs_dropout_prob": config.get("attention_dropout", 0.1),
        "activation_dropout_prob": config.get("activation_dropout", 0.0),
        "type_vocab_size": config.get("type_vocab_size", 3),
        "segments": "attention",
        "layer_norm_eps": config.get("layer_norm_eps", 1e-9),
        "pad_token_id": config.get("pad_token_id"),
        "lm_head": "tied",
        **{name: config[name] for name in ("id2label", "label2id", "problem_type") if config.get(name) is not None},
    }


def from_funnel(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Translate the state dict of transformers' ``FunnelModel`` or ``FunnelBaseModel`` into an :class:`Encoder`'s.

    Raises:
        ValueError: if a weight is missing, or differs in shape from that of another layer; the message names it.
    """
    found = {ours: _get(state, theirs) for ours, theirs in funnel_names(config).items()}
    for ours, theirs in funnel_positions(config).items():
        parts = [_get(state, name) for name in theirs]
        for name, part in zip(theirs, parts, strict=True):
            if part.shape != parts[0].shape:
                shapes = f"{tuple(part.shape)}, {theirs[0]!r} {tuple(parts[0].shape)}"
                raise InputError("checkpoint", f"{name!r} has shape {shapes}")
        stacked = torch.stack(parts)
        found[ours] = stacked.flatten(2) if ours == "position.kernel" else stacked
    return found


def funnel_names(config: EncoderConfig) -> dict[str, str]:
    """Return our name and transformers' for all tensors of an encoder except the position method's."""
    found = {"embeddings.word.weight": "embeddings.word_embeddings.weight"}
    found |= both({"embeddings.norm": "embeddings.layer_norm"})
    for layer, prefix in enumerate(funnel_layers(config)):
        found |= dict(_names(layer, prefix, config))
    return found


def funnel_positions(config: EncoderConfig) -> dict[str, list[str]]:
    """Return our name for each tensor of the position method, and transformers' names of the tensors stacked in it."""
    layers = funnel_layers(config)
    return {f"position.{ours}": [f"{prefix}.{theirs}" for prefix in layers] for ours, theirs in _POSITION.items()}


def both(modules: Mapping[str, str]) -> dict[str, str]:
    """Turn names of modules into those of their weights and biases."""
    return {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in modules.items() for part in ("weight", "bias")}


def to_funnel(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Translate our state dict into that of ``FunnelModel`` (or, without decoder weights, ``FunnelBaseModel``).

    Raises:
        ValueError: if a weight is missing, as it is with another position method; the message names it.
    """
    found = {
        "embeddings.word_embeddings.weight": _get(state, "embeddings.word.weight"),
        "embeddings.layer_norm.weight": _get(state, "embeddings.norm.weight"),
        "embeddings.layer_norm.bias": _get(state, "embeddings.norm.bias"),
    }
    heads = (config.num_attention_heads, config.head_dim)
    for layer, prefix in enumerate(funnel_layers(config)):
        if f"layers.{layer}.up.weight" not in state:
            break  # a decoder that was left out
        for ours, theirs in _names(layer, prefix, config):
            found[theirs] = _get(state, ours)
        for name, theirs in _POSITION.items():
            tensor = _get(state, f"position.{name}")[layer]
            found[f"{prefix}.{theirs}"] = tensor.unflatten(-1, heads) if name == "kernel" else tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_authors(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Translate the state dict of the authors' PyTorch ``FunnelTFM`` into that of ``FunnelBaseModel``.

    Both hold the same numbers; the authors keep a linear layer's weight as (inputs, outputs) with heads as an axis.

    Raises:
        ValueError: if a weight is missing; the message names it.
    """
    found = {
        "embeddings.word_embeddings.weight": _get(state, "input_layer.0.lookup_table"),
        "embeddings.layer_norm.weight": _get(state, "input_layer.1.weight"),
        "embeddings.layer_norm.bias": _get(state, "input_layer.1.bias"),
    }
    inner, width = config.num_attention_heads * config.head_dim, config.hidden_size
    for layer, prefix in enumerate(funnel_layers(config)):
        if prefix.startswith("decoder"):
            break
        for _, name in _names(layer, prefix, config):
            within = name.removeprefix(f"{prefix}.")
            part, _, parameter = within.rpartition(".")
            tensor = _get(state, _authors_name(layer, within))
            if parameter == "weight" and part in _LINEAR.values():
                rows = inner if part == "attention.post_proj" else tensor.shape[0]
                tensor = tensor.reshape(rows, width if part == "attention.post_proj" else -1).T
            elif parameter == "bias" and part in _LINEAR.values():
                tensor = tensor.flatten()
            found[name] = tensor
        for theirs in _POSITION.values():
            found[f"{prefix}.{theirs}"] = _get(state, _authors_name(layer, theirs))
    return found


def funnel_layers(config: EncoderConfig) -> list[str]:
    """Return transformers' names of the distinct layers, with the decoder's last."""
    blocks = parse_blocks(config.blocks)
    names = [f"encoder.blocks.{index}.{layer}" for index, block in enumerate(blocks) for layer in range(block.layers)]
    if config.decoder_layers != "0":
        names += [f"decoder.layers.{layer}" for layer in range(parse_blocks(config.decoder_layers)[0].layers)]
    return names


def _names(layer: int, prefix: str, config: EncoderConfig) -> Iterator[tuple[str, str]]:
    """Yield our name and transformers' for all parameters of a layer except the position method's."""
    for ours, theirs in {**_LINEAR, **_NORMS}.items():
        for parameter in ("weight", "bias"):
            if (ours, parameter) != ("attention.query", "bias") or config.query_bias:
                yield f"layers.{layer}.{ours}.{parameter}", f"{prefix}.{theirs}.{parameter}"
    for ours, theirs in _SEGMENTS.items():
        yield f"layers.{layer}.{ours}", f"{prefix}.{theirs}"


def _authors_name(layer: int, name: str) -> str:
    """Return the authors' name for what transformers calls ``name`` within a layer."""
    part, rest = name.split(".", 1)
    if part == "attention":
        return f"attn_layers.{layer}.{rest}"
    for theirs, authors in _AUTHORS.items():
        name = name.replace(theirs, authors)
    return f"pffn_layers.{layer}.{name.removeprefix('ffn.')}"


def _get(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise InputError("checkpoint", f"it has no {name!r}, which this model needs")
    return state[name]
