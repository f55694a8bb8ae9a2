"""BERT, ALBERT, RoBERTa and ELECTRA as transformers names them: a table for each, and the configuration to go with it.

Nothing here reads or writes files: it translates names between state dicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from ..config import EncoderConfig
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import (
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from .funnel import both
from .loading import BODY, Checkpoint, no_place

_WORDS = "embeddings.word_embeddings.weight"
_EMBEDDINGS = {
    "embeddings.word.weight": _WORDS,
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
    **both({"embeddings.norm": "embeddings.LayerNorm"}),
    "position.weight": "embeddings.position_embeddings.weight",
}
_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_TASKS = {
    "ForTokenClassification": (EncoderForTokenClassification, both({"token_classifier": "classifier"})),
    "ForQuestionAnswering": (EncoderForQuestionAnswering, both({"span": "qa_outputs"})),
}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# What has no counterpart here, and what it has to be.
_WITHOUT = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "pruned_heads": {},
}


class Family(NamedTuple):
    """How transformers writes one kind of model. Names are ours first, theirs without ``prefix``.

    Args:
        name: what its classes' names begin with.
        prefix: what precedes the encoder's names in a model with a head.
        models: by what follows ``name``: our class, and the names of the head's parts.
        tied: names of tensors that are one, and the name that is read.
        layers: what precedes the names within a layer.
        layer: modules of a layer.
        projection: from embeddings to wider hidden states.
        always_projects: whether that is there also where the widths are the same.
        pooler: where a classifier of sequences takes its dense layer from; {} if it has one of its own.
        unused: beginnings of names without a counterpart.
        classifier_act: activation in a classifier of sequences.
        masked_lm_act: activation of the masked-LM head, whatever the configuration says; None if it is that.
        skips_padding: whether positions are counted from the one after the padding token's id.
    """

    name: str
    prefix: str
    models: Mapping[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]]
    tied: Mapping[str, str]
    layers: str = "encoder.layer.{}."
    layer: Mapping[str, str] = _LAYER
    projection: str = "embeddings_project"
    always_projects: bool = False
    pooler: Mapping[str, str] = {}
    unused: tuple[str, ...] = ()
    classifier_act: str = "tanh"
    masked_lm_act: str | None = None
    skips_padding: bool = False

    def encoder_names(self, config: EncoderConfig) -> dict[str, str]:
        """Our name and theirs for all tensors of an encoder."""
        modules = {
            f"layers.{layer}.{ours}": self.layers.format(layer) + theirs
            for layer in range(max(config.passes) + 1)
            for ours, theirs in self.layer.items()
        }
        if config.embedding_size != config.hidden_size:
            modules["embeddings.projection"] = self.projection
        return {**_EMBEDDINGS, **both(modules)}


def _models(
    masked_lm: Mapping[str, str], sequence: Mapping[str, str]
) -> dict[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]]:
    return {
        "Model": (Encoder, {}),
        "ForMaskedLM": (EncoderForMaskedLM, masked_lm),
        "ForSequenceClassification": (EncoderForSequenceClassification, sequence),
        **_TASKS,
    }


_OWN_CLASSIFIER = both({"classifier.dense": "classifier.dense", "classifier.out": "classifier.out_proj"})
_BERT_POOLER = both({"classifier.dense": "pooler.dense"})
_BERT_MASKED_LM = {
    **both({"head.dense": "cls.predictions.transform.dense", "head.norm": "cls.predictions.transform.LayerNorm"}),
    "head.decoder.bias": "cls.predictions.bias",
}
_ALBERT_POOLER = both({"classifier.dense": "pooler"})
_ALBERT_MASKED_LM = {
    **both({"head.dense": "predictions.dense", "head.norm": "predictions.LayerNorm"}),
    "head.decoder.bias": "predictions.bias",
}
_ROBERTA_MASKED_LM = {
    **both({"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm"}),
    "head.decoder.bias": "lm_head.bias",
}
_ELECTRA_MASKED_LM = {
    **both({"head.dense": "generator_predictions.dense", "head.norm": "generator_predictions.LayerNorm"}),
    "head.decoder.bias": "generator_lm_head.bias",
}
_ELECTRA_DISCRIMINATOR = both(
    {
        "discriminator_head.dense": "discriminator_predictions.dense",
        "discriminator_head.out": "discriminator_predictions.dense_prediction",
    }
)

FAMILIES = {
    "bert": Family(
        name="Bert",
        prefix="bert.",
        models={
            **_models(_BERT_MASKED_LM, {**_BERT_POOLER, **both({"classifier.out": "classifier"})}),
            "ForPreTraining": (EncoderForMaskedLM, _BERT_MASKED_LM),
        },
        tied={"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
        pooler=_BERT_POOLER,
        unused=("pooler.", "cls.seq_relationship."),
    ),
    "albert": Family(
        name="Albert",
        prefix="albert.",
        models={
            **_models(_ALBERT_MASKED_LM, {**_ALBERT_POOLER, **both({"classifier.out": "classifier"})}),
            "ForPreTraining": (EncoderForMaskedLM, _ALBERT_MASKED_LM),
        },
        tied={"predictions.decoder.weight": _WORDS, "predictions.decoder.bias": "predictions.bias"},
        layers="encoder.albert_layer_groups.{}.albert_layers.0.",
        layer={
            "attention.query": "attention.query",
            "attention.key": "attention.key",
            "attention.value": "attention.value",
            "attention.out": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "up": "ffn",
            "down": "ffn_output",
            "feed_forward_norm": "full_layer_layer_norm",
        },
        projection="encoder.embedding_hidden_mapping_in",
        always_projects=True,
        pooler=_ALBERT_POOLER,
        unused=("pooler.", "sop_classifier."),
    ),
    "roberta": Family(
        name="Roberta",
        prefix="roberta.",
        models=_models(_ROBERTA_MASKED_LM, _OWN_CLASSIFIER),
        tied={"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
        unused=("pooler.",),
        masked_lm_act="gelu",
        skips_padding=True,
    ),
    "electra": Family(
        name="Electra",
        prefix="electra.",
        models={
            **_models(_ELECTRA_MASKED_LM, _OWN_CLASSIFIER),
            "ForPreTraining": (EncoderForPreTraining, _ELECTRA_DISCRIMINATOR),
        },
        tied={"generator_lm_head.weight": _WORDS},
        classifier_act="gelu",
        masked_lm_act="gelu",
    ),
}
"""By transformers' ``model_type``."""


def bert_config(found: Mapping[str, Any], family: Family, *, masked_lm: bool) -> dict[str, Any]:
    """The arguments of :class:`EncoderConfig` that make the model of a family's configuration, as found in its file.

    ``masked_lm`` says whether a masked-LM head is wanted.

    Raises:
        ValueError: for an option that has no counterpart; the message names it.
    """
    for name, wanted in _WITHOUT.items():
        if found.get(name) not in (None, wanted):
            raise ValueError(f"{name}: expected {wanted!r}, got {found[name]!r} in the checkpoint's configuration")
    config = AutoConfig.for_model(**found)
    embedding_size = getattr(config, "embedding_size", config.hidden_size)
    if family.always_projects and embedding_size == config.hidden_size:
        raise ValueError(
            f"embedding_size: expected another width than hidden_size, got {embedding_size} for both in the "
            f"checkpoint's configuration, where {family.name} still has a layer between them"
        )
    if masked_lm and not config.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings: expected a masked-LM head tied to the embeddings, got False in the checkpoint's "
            "configuration"
        )
    if masked_lm and family.masked_lm_act not in (None, config.hidden_act):
        raise ValueError(
            f"hidden_act: expected {family.masked_lm_act!r}, which is that of {family.name}'s masked-LM head whatever "
            f"it says, got {config.hidden_act!r} in the checkpoint's configuration"
        )
    layers = config.num_hidden_layers
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "embedding_size": embedding_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "blocks": f"1x{layers}" if hasattr(config, "num_hidden_groups") else str(layers),
        "position": "learned",
        "max_position_embeddings": config.max_position_embeddings - _skipped(family, config.pad_token_id),
        # The same function, fused.
        "hidden_act": {"gelu_new": "gelu_pytorch_tanh"}.get(config.hidden_act, config.hidden_act),
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "attention_probs_dropout_prob": config.attention_probs_dropout_prob,
        "classifier_dropout": getattr(config, "classifier_dropout_prob", getattr(config, "classifier_dropout", None)),
        "classifier_act": family.classifier_act,
        "type_vocab_size": config.type_vocab_size,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.layer_norm_eps,
        "pad_token_id": config.pad_token_id,
        **{name: getattr(config, name) for name in ("id2label", "label2id", "problem_type")},
    }


def from_bert(
    state: Mapping[str, Tensor], family: Family, config: EncoderConfig, head: Mapping[str, str], *, tied: bool
) -> Checkpoint:
    """A checkpoint of a family by our names.

    Args:
        state: the checkpoint's tensors; the names of the first releases (LayerNorm.gamma) are understood.
        family: what it is one of.
        config: that of :func:`bert_config`.
        head: names of the parts of its head.
        tied: whether it matters that those of a masked-LM head are the embeddings'.

    Raises:
        ValueError: for a tensor that no model of the family has; the message names it.
    """
    state = {_modern(name).removeprefix(family.prefix): tensor for name, tensor in state.items()}
    unused = []
    for copy, name in family.tied.items():
        if copy in state and not torch.equal(state.setdefault(name, state[copy]), state[copy]):
            if tied:
                raise ValueError(f"checkpoint: expected {copy!r} to equal {name!r}, got others; heads here are tied")
            unused.append(copy)
        state.pop(copy, None)
    names = {BODY + ours: theirs for ours, theirs in family.encoder_names(config).items()}
    names |= {**family.pooler, **head}
    translated = {ours: state[theirs] for ours, theirs in names.items() if theirs in state}
    table = BODY + "position.weight"
    if table in translated:
        translated[table] = translated[table][_skipped(family, config.pad_token_id) :]
    known = {theirs for _, other in family.models.values() for theirs in other.values()}
    for name in sorted(state.keys() - names.values()):
        if name not in known and name not in _BUFFERS and not name.startswith(family.unused):
            raise no_place(name)
    unused += [name for name in state if name not in names.values()]
    return Checkpoint(translated, names, tuple(unused))


def _modern(name: str) -> str:
    """A tensor's name as it is since the norms' are weight and bias."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{'weight' if m[1] == 'gamma' else 'bias'}", name)


def _skipped(family: Family, pad_token_id: int | None) -> int:
    """How many rows of the position table come before the first position's."""
    if not family.skips_padding:
        return 0
    if pad_token_id is None:
        raise ValueError(f"pad_token_id: {family.name} counts positions from it, got None in the configuration")
    return pad_token_id + 1
