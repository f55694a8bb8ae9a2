"""Converts Funnel-Transformers of transformers, configurations and tensors, into ours.

Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import FunnelConfig

from ...errors import InputError
from ..blocks import parse_blocks
from ..config import EncoderConfig
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import EncoderForMaskedLM, EncoderForPreTraining, EncoderForSequenceClassification
from .families import DISCRIMINATOR, TASKS, both
from .loading import BODY, Checkpoint, no_place

# By transformers' class: our class, and the names of the head's parts, ours first.
FUNNELS: dict[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]] = {
    "FunnelModel": (Encoder, {}),
    "FunnelBaseModel": (Encoder, {}),
    "FunnelForMaskedLM": (EncoderForMaskedLM, {"head.decoder.bias": "lm_head.bias"}),
    "FunnelForPreTraining": (EncoderForPreTraining, DISCRIMINATOR),
    "FunnelForSequenceClassification": (
        EncoderForSequenceClassification,
        both({"classifier.dense": "classifier.linear_hidden", "classifier.out": "classifier.linear_out"}),
    ),
    **{f"Funnel{task}": model for task, model in TASKS.items()},
}

WITHOUT_DECODER = ("FunnelBaseModel", "FunnelForSequenceClassification")
_TIED = "lm_head.weight"  # a copy of the embeddings

_EMBEDDINGS = {
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    **both({"embeddings.norm": "embeddings.layer_norm"}),
}
_LAYER = {
    **both(
        {
            "attention.query": "attention.q_head",
            "attention.key": "attention.k_head",
            "attention.value": "attention.v_head",
            "attention.out": "attention.post_proj",
            "up": "ffn.linear_1",
            "down": "ffn.linear_2",
            "attention_norm": "attention.layer_norm",
            "feed_forward_norm": "ffn.layer_norm",
        }
    ),
    "attention.segments.bias": "attention.r_s_bias",
    "attention.segments.weight": "attention.seg_embed",
}
_POSITION = {
    "content_bias": "attention.r_w_bias",
    "position_bias": "attention.r_r_bias",
    "kernel": "attention.r_kernel",
}
_FIELDS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "head_dim": "d_head",
    "intermediate_size": "d_inner",
    "pooling": "pooling_type",
    "pool_query_only": "pool_q_only",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "activation_dropout_prob": "activation_dropout",
    **{
        name: name
        for name in (
            *("vocab_size", "separate_cls", "truncate_seq", "layer_norm_eps", "pad_token_id"),
            *("id2label", "label2id", "problem_type"),
        )
    },
}
"""Our fields that transformers' configuration has too, with its names."""


def funnel_config(config: FunnelConfig, *, decoder: bool = True) -> dict[str, Any]:
    """Translate a ``FunnelConfig`` of transformers into arguments of :class:`EncoderConfig`.

    ``decoder`` says whether the model has the decoder that the configuration describes.

    Raises:
        ValueError: for an option that has no counterpart.
    """
    sizes = config.block_sizes
    repeats = config.block_repeats or [1] * len(sizes)
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
    if config.pooling_type not in ("mean", "max"):
        raise InputError("pooling_type", f"expected mean or max, got {config.pooling_type!r}")
    blocks = (f"{size}x{times}" if times > 1 else str(size) for size, times in zip(sizes, repeats, strict=True))
    return {
        **{ours: getattr(config, theirs) for ours, theirs in _FIELDS.items()},
        "blocks": "-".join(blocks),
        "decoder_layers": str(layers),
        "position": "transformer_xl",
        "position_options": {"form": "factorized" if config.attention_type == "factorized" else "shifted"},
        # The same function, fused.
        "hidden_act": "gelu_pytorch_tanh" if config.hidden_act == "gelu_new" else config.hidden_act,
        "query_bias": False,
        "type_vocab_size": getattr(config, "type_vocab_size", 3),
        "segments": "attention",
        "lm_head": "tied",
    }


def from_funnel(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Translate the state dict of transformers' ``FunnelModel`` or ``FunnelBaseModel`` into an :class:`Encoder`'s.

    Raises:
        ValueError: if a weight is missing, or differs in shape from that of another layer; the message names it.
    """
    found = {}
    for ours, theirs in funnel_names(config).items():
        parts = [_get(state, name) for name in theirs]
        for name, part in zip(theirs, parts, strict=True):
            if part.shape != parts[0].shape:
                shapes = f"{tuple(part.shape)}, {theirs[0]!r} {tuple(parts[0].shape)}"
                raise InputError("checkpoint", f"{name!r} has shape {shapes}")
        found[ours] = torch.stack(parts) if ours.startswith("position.") else parts[0]
    found["position.kernel"] = found["position.kernel"].flatten(2)
    return found


def funnel_names(config: EncoderConfig) -> dict[str, list[str]]:
    """Return our name for each tensor of an encoder, and transformers': one, or those of all layers stacked in it."""
    blocks = parse_blocks(config.blocks)
    layers = [f"encoder.blocks.{index}.{layer}" for index, block in enumerate(blocks) for layer in range(block.layers)]
    if config.decoder_layers != "0":
        layers += [f"decoder.layers.{layer}" for layer in range(parse_blocks(config.decoder_layers)[0].layers)]
    found = {ours: [theirs] for ours, theirs in _EMBEDDINGS.items()}
    for layer, prefix in enumerate(layers):
        for ours, theirs in _LAYER.items():
            if ours != "attention.query.bias" or config.query_bias:
                found[f"layers.{layer}.{ours}"] = [f"{prefix}.{theirs}"]
    for ours, theirs in _POSITION.items():
        found[f"position.{ours}"] = [f"{prefix}.{theirs}" for prefix in layers]
    return found


def _get(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise InputError("checkpoint", f"it has no {name!r}, which this model needs")
    return state[name]


def from_funnel_model(
    state: Mapping[str, Tensor], own: EncoderConfig, config: EncoderConfig, head: Mapping[str, str]
) -> Checkpoint:
    """Rename the tensors of a checkpoint of transformers' Funnel to this library's names.

    Args:
        state: the checkpoint's tensors.
        own: the checkpoint's configuration.
        config: the configuration of the model to build.
        head: the names of the head's parts.

    Raises:
        ValueError: if a tensor is missing, or no such model has it; the message names it.
    """
    state = {name.removeprefix("funnel."): tensor for name, tensor in state.items()}
    heads = {theirs for _, names in FUNNELS.values() for theirs in names.values()}
    for name in sorted(state.keys() - {*chain(*funnel_names(own).values())} - heads - {_TIED}):
        raise no_place(name)
    found = {BODY + ours: tensor for ours, tensor in from_funnel(state, config).items()}
    found |= {ours: state[theirs] for ours, theirs in head.items() if theirs in state}
    parts = funnel_names(config)
    names = {BODY + ours: theirs[0] for ours, theirs in parts.items() if not ours.startswith("position.")} | dict(head)
    read = {*chain(*parts.values()), *head.values(), _TIED}
    return Checkpoint(found, names, tuple(name for name in state if name not in read))
