"""Funnel-Transformers: their options as ours, and positions that are one tensor for all layers here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..blocks import parse_blocks
from ..config import EncoderConfig

_WITHOUT_DECODER = ("FunnelBaseModel", "FunnelForSequenceClassification")
_SEGMENTS = {"bias": "attention.r_s_bias", "weight": "attention.seg_embed"}
_POSITION = {
    "content_bias": "attention.r_w_bias",
    "position_bias": "attention.r_r_bias",
    "kernel": "attention.r_kernel",
}
"""The parts of positions, of which :func:`funnel_state` stacks those of all layers under their names in a layer."""


def funnel_options(config: Any) -> dict[str, Any]:
    """Return the fields of a Funnel that depend on several of its options, or are named otherwise.

    Raises:
        InputError: for a decoder that has no counterpart.
    """
    sizes, repeats = config.block_sizes, config.block_repeats
    decoder = (config.architectures or [""])[0] not in _WITHOUT_DECODER
    layers = config.num_decoder_layers if decoder else 0
    if decoder and not (len(sizes) > 1 and repeats[0] == 1 and layers):
        # In these cases transformers adds the states of an earlier pass, adds the last states to themselves, or runs no
        # layer after.
        raise InputError(
            "block_sizes",
            "expected a decoder to have layers, and before it several blocks of which the first does not "
            f"repeat, got block_sizes {sizes}, block_repeats {repeats} and num_decoder_layers {layers} in the "
            "checkpoint's configuration",
        )
    blocks = (f"{size}x{times}" if times > 1 else str(size) for size, times in zip(sizes, repeats, strict=True))
    return {
        "blocks": "-".join(blocks),
        "decoder_layers": str(layers),
        "position_options": {"form": "factorized" if config.attention_type == "factorized" else "shifted"},
        "type_vocab_size": getattr(config, "type_vocab_size", 3),
    }


def funnel_layers(config: EncoderConfig) -> list[str]:
    """Return the beginning of the names in each layer, those of the decoder last."""
    blocks = parse_blocks(config.blocks)
    layers = [f"encoder.blocks.{index}.{layer}." for index, block in enumerate(blocks) for layer in range(block.layers)]
    if config.decoder_layers != "0":
        layers += [f"decoder.layers.{layer}." for layer in range(parse_blocks(config.decoder_layers)[0].layers)]
    return layers


def funnel_names(config: EncoderConfig) -> dict[str, str]:
    """Return our names of the tensors of segments and positions, with theirs."""
    segments = {
        f"layers.{layer}.attention.segments.{ours}": prefix + theirs
        for layer, prefix in enumerate(funnel_layers(config))
        for ours, theirs in _SEGMENTS.items()
    }
    return segments | {f"position.{ours}": theirs for ours, theirs in _POSITION.items()}


def funnel_state(state: Mapping[str, Tensor], config: EncoderConfig, _: Any) -> dict[str, Tensor]:
    """Return the tensors with the positions of the configuration's layers stacked into one tensor for each part."""
    found = {name: tensor for name, tensor in state.items() if not name.endswith(tuple(_POSITION.values()))}
    for part in _POSITION.values():
        parts = [state[prefix + part] for prefix in funnel_layers(config) if prefix + part in state]
        if parts:
            found[part] = torch.stack(parts)
            found[part] = found[part].flatten(2) if part == _POSITION["kernel"] else found[part]
    return found
