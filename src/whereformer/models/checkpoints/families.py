"""The tensor names of BERT and its kin, up to ModernBERT and Funnel, with ours: one table per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig

from ...errors import InputError, shown
from ..config import EncoderConfig
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import (
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from .deberta import BIAS, KEYS, QUERIES, TABLE, deberta_options, deberta_state
from .funnel import funnel_layers, funnel_names, funnel_options, funnel_state


def both(modules: Mapping[str, str]) -> dict[str, str]:
    """Turn names of modules into those of their weights and biases."""
    return {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in modules.items() for part in ("weight", "bias")}


_WORDS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
"""A table of positions, which may begin with rows for padding."""
RELATIVE = "encoder.relative_attention_bias.weight"
"""A table of buckets, (buckets, heads)."""
_WORDS_AND_NORM = {"embeddings.word.weight": _WORDS, **both({"embeddings.norm": "embeddings.LayerNorm"})}
_WITHOUT_POSITIONS = {
    **_WORDS_AND_NORM,
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
}
_EMBEDDINGS = {**_WITHOUT_POSITIONS, "position.weight": POSITIONS}
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
    "ForQuestionAnswering": (Encoder, both({"span": "qa_outputs"})),  # which no encoder has: it is dropped
}


class Family(NamedTuple):
    """How the tensors and options of one family are named. Tables map our names to theirs, without ``prefix``.

    Args:
        name: the beginning of its class names.
        prefix: the prefix of the encoder's names in a model with a head.
        models: our class and the names of the head's parts, by the part of the class name after ``name``.
        tied: names of tied copies, with the name that is read.
        embeddings: the tensors of embeddings and positions, and of a norm at the end.
        layers: the prefix of names within a layer, with a place for its number; or a function of our configuration,
            which returns those of all layers.
        layer: the modules of a layer.
        projection: the layer from embeddings to wider hidden states.
        pooler: the source of the dense layer in a sequence classifier; {} if it has its own.
        unused: beginnings of names without a counterpart.
        skips_padding: whether positions are counted from the one after the padding token's id.
        fused: whether one projection makes query, key and value, whose rows follow one another.
        without: options without a counterpart here, each with the value that it must have.
        renamed: their options, by our fields of another name.
        fixed: fields that all models of the family have.
        options: a function of their configuration, which returns more fields.
        positions: a function of our configuration, which returns more names of tensors.
        prepared: a function of the tensors, of our configuration and of theirs, which returns the tensors to read
            instead.
    """

    name: str
    prefix: str
    models: Mapping[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]]
    tied: Mapping[str, str]
    embeddings: Mapping[str, str] = _EMBEDDINGS
    layers: str | Callable[[EncoderConfig], list[str]] = "encoder.layer.{}."
    layer: Mapping[str, str] = _LAYER
    projection: str = "embeddings_project"
    pooler: Mapping[str, str] = {}
    unused: tuple[str, ...] = ()
    skips_padding: bool = False
    fused: bool = False
    without: Mapping[str, Any] = {}
    renamed: Mapping[str, str] = {}
    fixed: Mapping[str, Any] = {}
    options: Callable[[PreTrainedConfig], dict[str, Any]] | None = None
    positions: Callable[[EncoderConfig], dict[str, str]] | None = None
    prepared: Callable[[Mapping[str, Tensor], EncoderConfig, Any], dict[str, Tensor]] | None = None

    def encoder_names(self, config: EncoderConfig) -> dict[str, str]:
        """Return our name and theirs for all tensors of an encoder."""
        if isinstance(self.layers, str):
            prefixes = [self.layers.format(layer) for layer in range(max(config.passes) + 1)]
        else:
            prefixes = self.layers(config)
        modules = {
            f"layers.{layer}.{ours}": prefix + theirs
            for layer, prefix in enumerate(prefixes)
            for ours, theirs in self.layer.items()
        }
        if config.embedding_size != config.hidden_size:
            modules["embeddings.projection"] = self.projection
        more = {} if self.positions is None else self.positions(config)
        return {**self.embeddings, **both(modules), **more}


def _bert_models(
    masked_lm: Mapping[str, str], pooler: Mapping[str, str]
) -> dict[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]]:
    """Classes of BERT and ALBERT, which are pretrained as masked language models and classify what they pool."""
    return {
        **_models(masked_lm, {**pooler, **both({"classifier.out": "classifier"})}),
        "ForPreTraining": (EncoderForMaskedLM, masked_lm),
    }


def _models(
    masked_lm: Mapping[str, str], sequence: Mapping[str, str]
) -> dict[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]]:
    return {
        "Model": (Encoder, {}),
        "ForMaskedLM": (EncoderForMaskedLM, masked_lm),
        "ForSequenceClassification": (EncoderForSequenceClassification, sequence),
        **_TASKS,
    }


def _masked_lm(dense: str, norm: str, bias: str) -> dict[str, str]:
    """The names of a masked-LM head's parts."""
    return {**both({"head.dense": dense, "head.norm": norm}), "head.decoder.bias": bias}


_OWN_CLASSIFIER = both({"classifier.dense": "classifier.dense", "classifier.out": "classifier.out_proj"})
_BERT_POOLER = both({"classifier.dense": "pooler.dense"})
_BERT_MASKED_LM = _masked_lm(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
)
_ALBERT_POOLER = both({"classifier.dense": "pooler"})
_ALBERT_MASKED_LM = _masked_lm("predictions.dense", "predictions.LayerNorm", "predictions.bias")
_ROBERTA_MASKED_LM = _masked_lm("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
_ELECTRA_MASKED_LM = _masked_lm(
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"
)
_DISCRIMINATOR = both(
    {
        "discriminator_head.dense": "discriminator_predictions.dense",
        "discriminator_head.out": "discriminator_predictions.dense_prediction",
    }
)
_DISTILBERT_MASKED_LM = _masked_lm("vocab_transform", "vocab_layer_norm", "vocab_projector.bias")
_MODERNBERT_MASKED_LM = _masked_lm("head.dense", "head.norm", "decoder.bias")
_GELU = {"hidden_act": "gelu"}
"""What the masked-LM heads of some families compute with, whatever the configuration says."""
_MODERNBERT_TRANSFORM = {"transform.dense": "head.dense", "transform.norm": "head.norm"}


def _in_turn(values: Sequence[Any]) -> list[Any]:
    """Return the shortest list that gives the values if it is repeated."""
    lengths = range(1, len(values) + 1)
    return next(list(values[:n]) for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))


def _modernbert(config: Any) -> dict[str, Any]:
    """Return the fields of a ModernBERT that depend on several of its options."""
    if config.classifier_activation != config.hidden_activation:
        reason = f"expected hidden_activation's {config.hidden_activation!r}"
        raise InputError("classifier_activation", f"{reason}, got {config.classifier_activation!r}")
    rotations = [config.rope_parameters[kind] for kind in config.layer_types]
    for rotation in rotations:
        if rotation["rope_type"] != "default":
            raise InputError("rope_type", f"expected 'default', got {shown(rotation['rope_type'])}")
    # The option counts both sides together.
    window = config.local_attention // 2
    if window < 1 and "sliding_attention" in config.layer_types:
        raise InputError("local_attention", f"expected at least 2, got {shown(config.local_attention)}")
    windows = _in_turn([0 if kind == "full_attention" else window for kind in config.layer_types])
    return {
        "position_options": {"base": _in_turn([rotation["rope_theta"] for rotation in rotations])},
        "windows": ",".join(map(str, windows)) if any(windows) else None,
        "sparse_prediction": config.sparse_prediction,
        "classifier_pooling": config.classifier_pooling,
    }


FAMILIES = {
    "bert": Family(
        name="Bert",
        prefix="bert.",
        models=_bert_models(_BERT_MASKED_LM, _BERT_POOLER),
        tied={"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
        pooler=_BERT_POOLER,
        unused=("pooler.", "cls.seq_relationship."),
    ),
    "albert": Family(
        name="Albert",
        prefix="albert.",
        models=_bert_models(_ALBERT_MASKED_LM, _ALBERT_POOLER),
        tied={"predictions.decoder.weight": _WORDS, "predictions.decoder.bias": "predictions.bias"},
        renamed={"classifier_dropout": "classifier_dropout_prob"},
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
        pooler=_ALBERT_POOLER,
        unused=("pooler.", "sop_classifier."),
    ),
    "roberta": Family(
        name="Roberta",
        prefix="roberta.",
        models=_models(_ROBERTA_MASKED_LM, _OWN_CLASSIFIER),
        tied={"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
        unused=("pooler.",),
        without=_GELU,
        skips_padding=True,
    ),
    "electra": Family(
        name="Electra",
        prefix="electra.",
        models={
            **_models(_ELECTRA_MASKED_LM, _OWN_CLASSIFIER),
            "ForPreTraining": (EncoderForPreTraining, _DISCRIMINATOR),
        },
        tied={"generator_lm_head.weight": _WORDS},
        without=_GELU,
        fixed={"classifier_act": "gelu"},
    ),
    "distilbert": Family(
        name="DistilBert",
        prefix="distilbert.",
        models=_models(
            _DISTILBERT_MASKED_LM, both({"classifier.dense": "pre_classifier", "classifier.out": "classifier"})
        ),
        tied={"vocab_projector.weight": _WORDS},
        embeddings={**_WORDS_AND_NORM, "position.weight": POSITIONS},
        layers="transformer.layer.{}.",
        layer={
            "attention.query": "attention.q_lin",
            "attention.key": "attention.k_lin",
            "attention.value": "attention.v_lin",
            "attention.out": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "feed_forward_norm": "output_layer_norm",
        },
        renamed={
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "classifier_dropout": "seq_classif_dropout",
        },
        fixed={"type_vocab_size": 0, "layer_norm_eps": 1e-12, "classifier_act": "relu"},
    ),
    "mpnet": Family(
        name="MPNet",
        prefix="mpnet.",
        models=_models(_ROBERTA_MASKED_LM, _OWN_CLASSIFIER),
        tied={"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
        embeddings={
            **_WORDS_AND_NORM,
            "position.parts.0.weight": POSITIONS,
            "position.parts.1.weight": RELATIVE,
        },
        layer={
            **_LAYER,
            "attention.query": "attention.attn.q",
            "attention.key": "attention.attn.k",
            "attention.value": "attention.attn.v",
            "attention.out": "attention.attn.o",
            "attention_norm": "attention.LayerNorm",
        },
        unused=("pooler.",),
        skips_padding=True,
        # transformers computes with these, whatever the configuration says.
        without={**_GELU, "pad_token_id": 1, "relative_attention_num_buckets": 32},
        fixed={"position": "learned+t5", "type_vocab_size": 0, "classifier_dropout": None},
    ),
    "modernbert": Family(
        name="ModernBert",
        prefix="model.",
        models={
            "Model": (Encoder, {}),
            "ForMaskedLM": (EncoderForMaskedLM, _MODERNBERT_MASKED_LM),
            "ForSequenceClassification": (
                EncoderForSequenceClassification,
                both(
                    {
                        "classifier.dense": "head.dense",
                        "classifier.norm": "head.norm",
                        "classifier.out": "classifier",
                    }
                ),
            ),
            "ForTokenClassification": (
                EncoderForTokenClassification,
                both({**_MODERNBERT_TRANSFORM, "token_classifier": "classifier"}),
            ),
        },
        tied={"decoder.weight": "embeddings.tok_embeddings.weight"},
        embeddings={
            "embeddings.word.weight": "embeddings.tok_embeddings.weight",
            **both({"embeddings.norm": "embeddings.norm", "norm": "final_norm"}),
        },
        layers="layers.{}.",
        layer={
            "attention.query": "attn.Wqkv",
            "attention.key": "attn.Wqkv",
            "attention.value": "attn.Wqkv",
            "attention.out": "attn.Wo",
            "attention_norm": "attn_norm",
            "up": "mlp.Wi",
            "down": "mlp.Wo",
            "feed_forward_norm": "mlp_norm",
        },
        fused=True,
        without=dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
        renamed={
            "hidden_act": "hidden_activation",
            "classifier_act": "classifier_activation",
            "layer_norm_eps": "norm_eps",
            "hidden_dropout_prob": "embedding_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "activation_dropout_prob": "mlp_dropout",
        },
        fixed={
            "position": "rope",
            "biases": False,
            "norm": "pre",
            "first_norm": False,
            "feed_forward": "gated",
            "type_vocab_size": 0,
            "classifier_norm": True,
        },
        options=_modernbert,
    ),
    "deberta-v2": Family(
        name="DebertaV2",
        prefix="deberta.",
        models=_models(_BERT_MASKED_LM, {**_BERT_POOLER, **both({"classifier.out": "classifier"})}),
        tied={"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
        embeddings={
            **_WITHOUT_POSITIONS,
            "position.table": TABLE,
            "position.key_weight": KEYS,
            "position.query_weight": QUERIES,
            "position.query_bias": BIAS,
        },
        layer={
            **_LAYER,
            "attention.query": "attention.self.query_proj",
            "attention.key": "attention.self.key_proj",
            "attention.value": "attention.self.value_proj",
        },
        pooler=_BERT_POOLER,
        unused=("pooler.", "lm_predictions.", "mask_predictions."),
        without={"legacy": True},
        options=deberta_options,
        prepared=deberta_state,
    ),
    "funnel": Family(
        name="Funnel",
        prefix="funnel.",
        models={
            **_models(
                {"head.decoder.bias": "lm_head.bias"},
                both({"classifier.dense": "classifier.linear_hidden", "classifier.out": "classifier.linear_out"}),
            ),
            "BaseModel": (Encoder, {}),
            "ForPreTraining": (EncoderForPreTraining, _DISCRIMINATOR),
        },
        tied={"lm_head.weight": _WORDS},
        embeddings={"embeddings.word.weight": _WORDS, **both({"embeddings.norm": "embeddings.layer_norm"})},
        layers=funnel_layers,
        layer={
            "attention.query": "attention.q_head",
            "attention.key": "attention.k_head",
            "attention.value": "attention.v_head",
            "attention.out": "attention.post_proj",
            "attention_norm": "attention.layer_norm",
            "up": "ffn.linear_1",
            "down": "ffn.linear_2",
            "feed_forward_norm": "ffn.layer_norm",
        },
        renamed={
            "head_dim": "d_head",
            "intermediate_size": "d_inner",
            "pooling": "pooling_type",
            "pool_query_only": "pool_q_only",
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "activation_dropout_prob": "activation_dropout",
            "separate_cls": "separate_cls",
            "truncate_seq": "truncate_seq",
        },
        fixed={
            "position": "transformer_xl",
            "segments": "attention",
            "query_bias": False,
            "lm_head": "tied",
            # A Funnel has no such options, or means something else by them.
            "max_position_embeddings": 512,
            "classifier_dropout": None,
            "initializer_range": 0.02,
        },
        options=funnel_options,
        positions=funnel_names,
        prepared=funnel_state,
    ),
}
"""The families by their ``model_type``."""

# RoBERTa with other vocabularies: bge-m3 and multilingual-e5 are the first.
for _kind, _name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert")):
    FAMILIES[_kind] = FAMILIES["roberta"]._replace(name=_name)
