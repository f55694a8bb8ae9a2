"""Converts Funnel-Transformers, configurations and tensors: from transformers to ours and back.

Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import FunnelConfig, PreTrainedModel
from transformers.models.funnel import modeling_funnel

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
_ALIKE = (
    *("vocab_size", "separate_cls", "truncate_seq", "layer_norm_eps", "pad_token_id"),
    *("id2label", "label2id", "problem_type"),
)
_FIELDS = {
    "d_model": "hidden_size",
    "n_head": "num_attention_heads",
    "d_head": "head_dim",
    "d_inner": "intermediate_size",
    "pooling_type": "pooling",
    "pool_q_only": "pool_query_only",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation_dropout": "activation_dropout_prob",
    **dict(zip(_ALIKE, _ALIKE, strict=True)),
}
"""The fields of transformers' configuration that ours has too, with our names."""
_FORMS = {"shifted": "relative_shift", "factorized": "factorized"}
_ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh"}
"""By transformers' name, the same function, fused."""


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
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
        "blocks": "-".join(blocks),
        "decoder_layers": str(layers),
        "position": "transformer_xl",
        "position_options": {"form": "factorized" if config.attention_type == "factorized" else "shifted"},
        "hidden_act": _ACTIVATIONS.get(config.hidden_act, config.hidden_act),
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


def to_funnel(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Translate our state dict into that of ``FunnelModel`` (or, without a decoder, ``FunnelBaseModel``).

    Raises:
        ValueError: if a weight is missing, as it is with another position method; the message names it.
    """
    found = {}
    for ours, theirs in funnel_names(config).items():
        # A position method counts the layers of a decoder that is left out.
        kept = [name for name in theirs if config.with_decoder or not name.startswith("decoder.")]
        if kept:
            own = _get(state, ours)
            if ours == "position.kernel":
                own = own.unflatten(-1, (config.num_attention_heads, config.head_dim))
            parts = own if ours.startswith("position.") else [own]
            found |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True) if name in kept}
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


def to_transformers(model: EncoderPreTrainedModel) -> PreTrainedModel:
    """Convert a Funnel-Transformer into a model of transformers, which can then be saved there.

    On padded batches the results differ unless ours has ``mask_pooling="all"``. If no token types are given,
    transformers assumes 0 for all tokens.

    Raises:
        TypeError: for a model that is not an encoder of this library.
        ValueError: for what transformers' Funnel does not have: another position method, pre-norm, narrower embeddings
            and so on.
    """
    known = {ours: name for name, (ours, _) in FUNNELS.items() if ours is not Encoder}
    if isinstance(model, Encoder):
        encoder, name = model, "FunnelModel" if model.has_decoder else "FunnelBaseModel"
    else:
        found = next((ours for ours in known if isinstance(model, ours)), None)
        if found is None:
            expected = ", ".join(["Encoder", *(ours.__name__ for ours in known)])
            raise TypeError(f"model: expected one of {expected}, got {type(model).__name__}")
        encoder, name = model.encoder, known[found]
    config = model.config
    _check_is_funnel(config, encoder)
    if name not in WITHOUT_DECODER and not encoder.has_decoder:
        # transformers would add the last states to themselves.
        raise InputError("blocks", f"transformers' {name} has a decoder, for which a single block is too few")
    blocks = parse_blocks(config.blocks)
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    theirs = FunnelConfig(
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
        block_sizes=[block.layers for block in blocks],
        block_repeats=[block.repeats for block in blocks],
        num_decoder_layers=int(config.decoder_layers),
        type_vocab_size=config.type_vocab_size,
        hidden_act=activations.get(config.hidden_act, config.hidden_act),
        attention_type=_FORMS[(config.position_options or {}).get("form", "shifted")],
    )
    state = to_funnel(encoder.state_dict(), config)
    if encoder is not model:
        state = {f"funnel.{key}": tensor for key, tensor in state.items()}
    own = model.state_dict()
    state |= {their_name: own[our_name] for our_name, their_name in FUNNELS[name][1].items()}
    translated: PreTrainedModel = getattr(modeling_funnel, name)(theirs)
    missing, unexpected = translated.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    translated.tie_weights()
    return translated.train(model.training)


def _check_is_funnel(config: EncoderConfig, encoder: Encoder) -> None:
    """Raise unless transformers' Funnel can be this model."""
    wanted = {
        "position": "transformer_xl",
        "norm": "post",
        "embedding_size": config.hidden_size,
        "windows": None,
        "segments": "attention",
        "query_bias": False,
        "lm_head": "tied",
        "tie_word_embeddings": True,
        "classifier_act": "tanh",
        "classifier_dropout": None,
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise InputError(name, f"transformers' Funnel has {value!r} only, this model {getattr(config, name)!r}")
    if config.pooling == "min" or "x" in config.decoder_layers:
        what = "pooling" if config.pooling == "min" else "decoder_layers"
        raise InputError(what, f"transformers' Funnel has no {getattr(config, what)!r}")
    options = config.position_options or {}
    if options.get("reset_cls", config.separate_cls) != config.separate_cls or options.get("dropout"):
        raise InputError("position_options", f"transformers' Funnel has none but its form, this model {options!r}")
    first = parse_blocks(config.blocks)[0]
    if encoder.has_decoder and first.repeats > 1:
        # transformers would add the states of an earlier pass.
        raise InputError(
            "blocks", f"transformers' decoder is wrong where the first block repeats, got {config.blocks!r}"
        )
