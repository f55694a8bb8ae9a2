"""Converts Funnel-Transformers, configurations and tensors: from transformers to ours and back, and from the authors'.

Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import FunnelConfig, PreTrainedModel
from transformers.models.funnel import modeling_funnel

from ...errors import InputError, shown
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
_EMBEDDINGS = {
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    **both({"embeddings.norm": "embeddings.layer_norm"}),
}
_SEGMENTS = {"attention.segments.bias": "attention.r_s_bias", "attention.segments.weight": "attention.seg_embed"}
_POSITION = {
    "content_bias": "attention.r_w_bias",
    "position_bias": "attention.r_r_bias",
    "kernel": "attention.r_kernel",
}
_AUTHORS = {"ffn.linear_1": "pffn.0", "ffn.linear_2": "pffn.3"}
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
    found = dict(_EMBEDDINGS)
    for layer, prefix in enumerate(funnel_layers(config)):
        found |= dict(_names(layer, prefix, config))
    return found


def funnel_positions(config: EncoderConfig) -> dict[str, list[str]]:
    """Return our name for each tensor of the position method, and transformers' names of the tensors stacked in it."""
    layers = funnel_layers(config)
    return {f"position.{ours}": [f"{prefix}.{theirs}" for prefix in layers] for ours, theirs in _POSITION.items()}


def to_funnel(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Translate our state dict into that of ``FunnelModel`` (or, without a decoder, ``FunnelBaseModel``).

    Raises:
        ValueError: if a weight is missing, as it is with another position method; the message names it.
    """
    found = {}
    for ours, theirs in funnel_names(config).items():
        if config.with_decoder or not theirs.startswith("decoder."):
            found[theirs] = _get(state, ours)
    for ours, names in funnel_positions(config).items():
        rows = _get(state, ours)
        if ours == "position.kernel":
            rows = rows.unflatten(-1, (config.num_attention_heads, config.head_dim))
        # A position method counts the layers of a decoder that is left out.
        parts = zip(names, rows, strict=True)
        found |= {name: part for name, part in parts if config.with_decoder or not name.startswith("decoder.")}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_authors(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Translate the state dict of the authors' PyTorch ``FunnelTFM`` into that of ``FunnelBaseModel``.

    Both hold the same numbers; the authors keep a linear layer's weight as (inputs, outputs) with heads as an axis.

    Raises:
        ValueError: if a weight is missing; the message names it.
    """
    embeddings = "input_layer.0.lookup_table", "input_layer.1.weight", "input_layer.1.bias"
    found = {theirs: _get(state, name) for theirs, name in zip(_EMBEDDINGS.values(), embeddings, strict=True)}
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
    for name in sorted(state.keys() - _funnel_tensors(own) - heads - {_TIED}):
        raise no_place(name)
    found = {BODY + ours: tensor for ours, tensor in from_funnel(state, config).items()}
    found |= {ours: state[theirs] for ours, theirs in head.items() if theirs in state}
    names = {BODY + ours: theirs for ours, theirs in funnel_names(config).items()} | dict(head)
    read = _funnel_tensors(config) | set(head.values()) | {_TIED}
    return Checkpoint(found, names, tuple(name for name in state if name not in read))


def _funnel_tensors(config: EncoderConfig) -> set[str]:
    """Return transformers' names of all tensors of a Funnel except the head's."""
    stacked = (name for stack in funnel_positions(config).values() for name in stack)
    return {*funnel_names(config).values(), *stacked}


def from_authors_weights(state: Mapping[str, Tensor], blocks: str, **options: Any) -> Encoder:
    """Build the authors' PyTorch Funnel-Transformer from its state dict, in evaluation mode.

    The authors' files are pickles, which this library does not open; ``torch.load(file, weights_only=True)`` returns
    the state dict. The sizes follow from its weights. The authors' PyTorch models have no decoder.

    Args:
        state: the state dict of ``FunnelTFM``.
        blocks: the layers, such as "6-3x2-3x2", which do not follow from the weights.
        options: other fields of :class:`EncoderConfig`, such as ``truncate_seq=False``.

    Raises:
        ValueError: if a weight is missing; the message names it.
    """
    kernel, inner, words = "attn_layers.0.r_kernel", "pffn_layers.0.pffn.0.bias", "input_layer.0.lookup_table"
    if not isinstance(state, Mapping):
        raise InputError("state", f"expected a state dict, got {shown(state)}")
    for name, dimensions in ((kernel, 3), (inner, 1), (words, 2)):
        if not isinstance(state.get(name), Tensor) or state[name].dim() != dimensions:
            raise InputError("state", f"it has no {name!r}, so it is not of the authors' model")
    width, heads, head_dim = state[kernel].shape
    sizes = {"d_model": width, "n_head": heads, "d_head": head_dim, "d_inner": len(state[inner]), "block_sizes": [1]}
    theirs = FunnelConfig(vocab_size=len(state[words]), **sizes)
    config = EncoderConfig.from_dict({**funnel_config(theirs, decoder=False), "blocks": blocks, **options})
    model = Encoder(config)
    model.load_state_dict(from_funnel(from_authors(state, config), config))
    return model.eval()


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
