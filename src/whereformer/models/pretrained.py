"""Models from checkpoints of other libraries, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import FunnelConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.funnel import modeling_funnel
from transformers.utils import cached_file

from .checkpoints import from_authors, from_funnel, funnel_config, to_funnel
from .config import EncoderConfig, parse_blocks
from .encoder import Encoder, EncoderPreTrainedModel
from .heads import (
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)

# Transformers' model, ours, and the names of the head's parts: ours first.
_MODELS: dict[str, tuple[type[EncoderPreTrainedModel], dict[str, str]]] = {
    "FunnelModel": (Encoder, {}),
    "FunnelBaseModel": (Encoder, {}),
    "FunnelForMaskedLM": (EncoderForMaskedLM, {"head.decoder.bias": "lm_head.bias"}),
    "FunnelForPreTraining": (
        EncoderForPreTraining,
        {
            f"discriminator_head.{ours}.{parameter}": f"discriminator_predictions.{theirs}.{parameter}"
            for ours, theirs in {"dense": "dense", "out": "dense_prediction"}.items()
            for parameter in ("weight", "bias")
        },
    ),
    "FunnelForSequenceClassification": (
        EncoderForSequenceClassification,
        {
            f"classifier.{ours}.{parameter}": f"classifier.{theirs}.{parameter}"
            for ours, theirs in {"dense": "linear_hidden", "out": "linear_out"}.items()
            for parameter in ("weight", "bias")
        },
    ),
    "FunnelForTokenClassification": (
        EncoderForTokenClassification,
        {f"token_classifier.{parameter}": f"classifier.{parameter}" for parameter in ("weight", "bias")},
    ),
    "FunnelForQuestionAnswering": (
        EncoderForQuestionAnswering,
        {f"span.{parameter}": f"qa_outputs.{parameter}" for parameter in ("weight", "bias")},
    ),
}


def load_pretrained(
    path_or_id: str | Path,
    position: str | None = None,
    *,
    model_class: type[EncoderPreTrainedModel] | None = None,
    **options: Any,
) -> EncoderPreTrainedModel:
    """A pretrained model as one of ours, in evaluation mode; weights are read from safetensors only.

    Args:
        path_or_id: a folder, or an id on the Hugging Face Hub, of a model of this library or of a Funnel-Transformer.
        position: another position method in place of the checkpoint's, with fresh parameters.
        model_class: what to build; by default what the checkpoint was saved from. Parts that the checkpoint lacks, as
            the head of another task, are fresh.
        options: fields of :class:`EncoderConfig` to change, as ``mask_pooling="all"`` for the masks of transformers'
            Funnel; what is no such field is an option of the position method.

    Without token types a Funnel's segments say nothing, as in the authors' code; transformers takes them to be 0, which
    is not the same: give zeros for its numbers.

    Raises:
        ValueError: for a checkpoint of another kind, or one without a weight that is needed, or of another size.
        TypeError: for an option that neither the configuration nor the position method has.
        OSError: if there is no such checkpoint, or none in safetensors.
    """
    try:
        found, _ = PreTrainedConfig.get_config_dict(path_or_id)
    except OSError as error:
        # What it says is about the rules for names on the Hub, also where a folder was meant.
        raise OSError(
            "path_or_id: expected a folder with a checkpoint, or an id on the Hugging Face Hub that can be read, "
            f"got {str(path_or_id)!r}"
        ) from error
    kind, names = found.get("model_type"), found.get("architectures") or []
    if kind == "funnel":
        saved_as = names[0] if names else "FunnelModel"
        if saved_as not in _MODELS:
            raise ValueError(f"path_or_id: expected one of {', '.join(_MODELS)}, got {saved_as}")
        if saved_as == "FunnelForMaskedLM" and not found.get("tie_word_embeddings", True):
            raise ValueError(
                "path_or_id: expected a masked-LM head tied to the embeddings, got tie_word_embeddings False"
            )
        built_as, head = _MODELS[saved_as]
        fields = funnel_config(found, decoder=saved_as not in _WITHOUT_DECODER)
        config = EncoderConfig.from_dict(_changed(fields, position, options))
        state = _from_funnel_model(_read(path_or_id), config, head)
    elif kind == EncoderConfig.model_type:
        built_as = next((ours for ours, _ in _MODELS.values() if ours.__name__ in names), Encoder)
        config = EncoderConfig.from_dict(_changed(found, position, options))
        state = _read(path_or_id)
        if "Electra" in names:
            # What ELECTRA trains for use is its discriminator.
            built_as = EncoderForPreTraining
            part = "discriminator."
            state = {name.removeprefix(part): tensor for name, tensor in state.items() if name.startswith(part)}
    else:
        raise ValueError(f"path_or_id: expected a whereformer or a funnel checkpoint, got model_type {kind!r}")
    model = (model_class or built_as)(config)
    _load(model, state, keep_position=position is None)
    return model.eval()


def from_authors_weights(state: Mapping[str, Tensor], blocks: str, **options: Any) -> Encoder:
    """The authors' PyTorch Funnel-Transformer, from its state dict, in evaluation mode.

    Their files are pickles, which this library does not open; ``torch.load(file, weights_only=True)`` gives the state
    dict. Sizes are read off its weights. Their PyTorch models have no decoder.

    Args:
        state: of ``FunnelTFM``.
        blocks: the layout, as "6-3x2-3x2"; the weights don't tell.
        options: other fields of :class:`EncoderConfig`, as ``truncate_seq=False``.

    Raises:
        ValueError: if a weight is missing; the message names it.
    """
    kernel, inner, words = "attn_layers.0.r_kernel", "pffn_layers.0.pffn.0.bias", "input_layer.0.lookup_table"
    for name in (kernel, inner, words):
        if name not in state:
            raise ValueError(f"state: it has no {name!r}, so it is not of the authors' model")
    width, heads, head_dim = state[kernel].shape
    sizes = {"d_model": width, "n_head": heads, "d_head": head_dim, "block_sizes": [1]}
    sizes["vocab_size"], sizes["d_inner"] = (
        len(state[words]),
        len(state[inner]),
    )
    config = EncoderConfig.from_dict({**funnel_config(sizes, decoder=False), "blocks": blocks, **options})
    model = Encoder(config)
    model.load_state_dict(from_funnel(from_authors(state, config), config))
    return model.eval()


def to_transformers(model: EncoderPreTrainedModel) -> PreTrainedModel:
    """The same Funnel-Transformer as a model of transformers, which then saves itself.

    Padded batches differ there unless ours has ``mask_pooling="all"``; and where no token types are given, transformers
    takes all of them to be 0.

    Raises:
        TypeError: for a model that is none of the encoder's.
        ValueError: for what transformers' Funnel cannot be: another position method, pre-norm, a narrower embedding...
    """
    known = {ours: name for name, (ours, _) in _MODELS.items() if ours is not Encoder}
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
    blocks = parse_blocks(config.blocks)
    theirs = FunnelConfig(
        vocab_size=config.vocab_size,
        block_sizes=[block.layers for block in blocks],
        block_repeats=[block.repeats for block in blocks],
        num_decoder_layers=int(config.decoder_layers),
        d_model=config.hidden_size,
        n_head=config.num_attention_heads,
        d_head=config.head_dim,
        d_inner=config.intermediate_size,
        hidden_act={"gelu_pytorch_tanh": "gelu_new"}.get(config.hidden_act, config.hidden_act),
        hidden_dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        activation_dropout=config.activation_dropout_prob,
        layer_norm_eps=config.layer_norm_eps,
        pooling_type=config.pooling,
        attention_type=_FORMS[(config.position_options or {}).get("form", "shifted")],
        separate_cls=config.separate_cls,
        truncate_seq=config.truncate_seq,
        pool_q_only=config.pool_query_only,
        type_vocab_size=config.type_vocab_size,
        id2label=config.id2label,
        label2id=config.label2id,
        problem_type=config.problem_type,
        pad_token_id=config.pad_token_id,
    )
    state = to_funnel(encoder.state_dict(), config)
    if encoder is not model:
        state = {f"funnel.{key}": tensor for key, tensor in state.items()}
    own = model.state_dict()
    state |= {their_name: own[our_name] for our_name, their_name in _MODELS[name][1].items()}
    translated: PreTrainedModel = getattr(modeling_funnel, name)(theirs)
    missing, unexpected = translated.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    translated.tie_weights()
    return translated.train(model.training)


_FORMS = {"shifted": "relative_shift", "factorized": "factorized"}
_WITHOUT_DECODER = ("FunnelBaseModel", "FunnelForSequenceClassification")


def _changed(fields: Mapping[str, Any], position: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's fields with another position method and other options, where they are given."""
    known = {*EncoderConfig().to_dict(), "num_labels"}
    own = {name: value for name, value in options.items() if name in known}
    others = {name: value for name, value in options.items() if name not in known}
    if position is not None:
        return {**fields, **own, "position": position, "position_options": others}
    return {**fields, **own, "position_options": {**(fields.get("position_options") or {}), **others}}


def _read(path_or_id: str | Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, from one file or several."""
    whole = cached_file(path_or_id, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if whole is not None:
        return load_file(whole)
    index = cached_file(path_or_id, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise OSError(f"path_or_id: {path_or_id} has no model.safetensors; weights are read from safetensors only")
    files = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    parts = [load_file(str(cached_file(path_or_id, file))) for file in files]
    return {name: tensor for part in parts for name, tensor in part.items()}


def _from_funnel_model(
    state: Mapping[str, Tensor], config: EncoderConfig, head: Mapping[str, str]
) -> dict[str, Tensor]:
    """The state dict of our model from transformers' one, whose head's parts are named in ``head``."""
    prefix = "funnel." if any(name.startswith("funnel.") for name in state) else ""
    body = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    found = from_funnel(body, config)
    return {
        **{f"encoder.{name}": tensor for name, tensor in found.items()},
        **{ours: state[theirs] for ours, theirs in head.items() if theirs in state},
    }


def _load(model: EncoderPreTrainedModel, state: Mapping[str, Tensor], *, keep_position: bool) -> None:
    """Put a state dict, whose encoder may be a part or the whole of it, into a model."""
    if not any(name.startswith("encoder.") for name in state):
        state = {f"encoder.{name}": tensor for name, tensor in state.items()}
    if not keep_position:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("encoder.position.")}
    if isinstance(model, Encoder):
        state = {name.removeprefix("encoder."): x for name, x in state.items() if name.startswith("encoder.")}
    own = model.state_dict()
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, this model {tuple(own[name].shape)}"
            raise ValueError(f"checkpoint: {name!r} has shape {shapes}; options may have changed a size")
    missing, _ = model.load_state_dict(state, strict=False)
    prefix = "" if isinstance(model, Encoder) else "encoder."
    lost = [
        name
        for name in missing
        if name.startswith(prefix) and (keep_position or not name.startswith(f"{prefix}position."))
    ]
    if lost:
        raise ValueError(f"checkpoint: it has no {lost[0]!r}, which this model needs")
    model.tie_weights()


def _check_is_funnel(config: EncoderConfig, encoder: Encoder) -> None:
    """Raise unless transformers' Funnel can be this model."""
    wanted = {
        "position": "transformer_xl",
        "norm": "post",
        "embedding_size": config.hidden_size,
        "segments": "attention",
        "query_bias": False,
        "lm_head": "tied",
        "tie_word_embeddings": True,
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name}: transformers' Funnel has {value!r} only, this model {getattr(config, name)!r}")
    if config.pooling == "min" or "x" in config.decoder_layers:
        what = "pooling" if config.pooling == "min" else "decoder_layers"
        raise ValueError(f"{what}: transformers' Funnel has no {getattr(config, what)!r}")
    options = config.position_options or {}
    if options.get("reset_cls", config.separate_cls) != config.separate_cls or options.get("dropout"):
        raise ValueError(f"position_options: transformers' Funnel has none but its form, this model {options!r}")
    first = parse_blocks(config.blocks)[0]
    if encoder.has_decoder and first.repeats > 1:
        # It would add the states of an earlier pass.
        raise ValueError(f"blocks: transformers' decoder is wrong where the first block repeats, got {config.blocks!r}")
