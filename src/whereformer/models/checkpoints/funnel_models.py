"""Converts whole Funnel-Transformers: from transformers to ours and back, and from the authors' weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import FunnelConfig, PreTrainedModel
from transformers.models.funnel import modeling_funnel

from ...errors import InputError, shown
from ..blocks import parse_blocks
from ..config import EncoderConfig
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import (
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from .funnel import both, from_authors, from_funnel, funnel_config, funnel_names, funnel_positions, to_funnel
from .loading import BODY, Checkpoint, no_place

# By transformers' class: our class, and the names of the head's parts, ours first.
FUNNELS: dict[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]] = {
    "FunnelModel": (Encoder, {}),
    "FunnelBaseModel": (Encoder, {}),
    "FunnelForMaskedLM": (EncoderForMaskedLM, {"head.decoder.bias": "lm_head.bias"}),
    "FunnelForPreTraining": (
        EncoderForPreTraining,
        both(
            {
                "discriminator_head.dense": "discriminator_predictions.dense",
                "discriminator_head.out": "discriminator_predictions.dense_prediction",
            }
        ),
    ),
    "FunnelForSequenceClassification": (
        EncoderForSequenceClassification,
        both({"classifier.dense": "classifier.linear_hidden", "classifier.out": "classifier.linear_out"}),
    ),
    "FunnelForTokenClassification": (EncoderForTokenClassification, both({"token_classifier": "classifier"})),
    "FunnelForQuestionAnswering": (EncoderForQuestionAnswering, both({"span": "qa_outputs"})),
}

_FORMS = {"shifted": "relative_shift", "factorized": "factorized"}
WITHOUT_DECODER = ("FunnelBaseModel", "FunnelForSequenceClassification")
_TIED = "lm_head.weight"  # a copy of the embeddings


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
    sizes = {"d_model": width, "n_head": heads, "d_head": head_dim, "block_sizes": [1]}
    sizes["vocab_size"], sizes["d_inner"] = len(state[words]), len(state[inner])
    config = EncoderConfig.from_dict({**funnel_config(sizes, decoder=False), "blocks": blocks, **options})
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
