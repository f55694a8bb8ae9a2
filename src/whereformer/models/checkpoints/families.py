"""The tensor names of BERT and its kin, up to ModernBERT and Funnel, with ours: one table per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from transformers import PreTrainedConfig

from ..config import EncoderConfig
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import (
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from .options import deberta_options, funnel_layers, funnel_options, modernbert_options

WORDS = "embeddings.word.weight"
"""Our name of the token embeddings; the last layer of a masked-LM head is tied to them."""
POSITIONS = "embeddings.position_embeddings.weight"
"""A table of positions, which may begin with rows for padding."""
RELATIVE = "encoder.relative_attention_bias.weight"
"""A table of buckets, (buckets, heads)."""
QKV = ("query", "key", "value")
"""The projections of a layer's attention, in the order of a fused projection."""
DISTANCES = ("encoder.rel_embeddings.weight", "encoder.LayerNorm.weight", "encoder.LayerNorm.bias")
"""DeBERTa's table of distances, and its norm."""

_WITHOUT_TYPES = {WORDS: "embeddings.word_embeddings.weight", "embeddings.norm": "embeddings.LayerNorm"}
_WITHOUT_POSITIONS = {**_WITHOUT_TYPES, "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight"}


def _layer(out: str, attention_norm: str, up: str, down: str, feed_forward_norm: str) -> dict[str, str]:
    """Return the table of a layer's parts besides query, key and value, in the order that they run in."""
    norms = {"attention_norm": attention_norm, "feed_forward_norm": feed_forward_norm}
    return {"attention.out": out, "up": up, "down": down, **norms}


def _masked_lm(dense: str, norm: str, bias: str) -> dict[str, str]:
    """Return the table of a masked-LM head, except for its matrix, which is tied to the embeddings."""
    return {"head.dense": dense, "head.norm": norm, "head.decoder.bias": bias}


def _classifier(dense: str, out: str) -> dict[str, str]:
    """Return the table of a sequence classifier."""
    return {"classifier.dense": dense, "classifier.out": out}


_LAYER = _layer(
    "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"
)
_BERT_HEADS = {
    **_masked_lm("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    **_classifier("pooler.dense", "classifier"),
}
_OWN_CLASSIFIER = _classifier("classifier.dense", "classifier.out_proj")
_ROBERTA_HEADS = {**_masked_lm("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"), **_OWN_CLASSIFIER}
_DISCRIMINATOR = {
    "discriminator_head.dense": "discriminator_predictions.dense",
    "discriminator_head.out": "discriminator_predictions.dense_prediction",
}
_GELU = {"hidden_act": "gelu"}
"""The activation of some families' masked-LM heads; the configuration does not change it."""
_TOKEN_HEADS = {"token_classifier": "classifier", "span": "qa_outputs"}
"""The token classifiers, which have the same names in all families."""


class Task(NamedTuple):
    """Our class for a class of theirs, and the beginnings of our names of its head."""

    model: type[EncoderPreTrainedModel]
    head: tuple[str, ...] = ()


_MASKED_LM, _DISCRIMINATES = Task(EncoderForMaskedLM, ("head.",)), Task(EncoderForPreTraining, ("discriminator_head.",))
_TASKS = {
    "Model": Task(Encoder),
    "ForMaskedLM": _MASKED_LM,
    "ForSequenceClassification": Task(EncoderForSequenceClassification, ("classifier.",)),
    "ForTokenClassification": Task(EncoderForTokenClassification, ("transform.", "token_classifier.")),
    "ForQuestionAnswering": Task(Encoder, ("span.",)),  # no encoder has this head: it is dropped
}


class Family(NamedTuple):
    """How the tensors and options of one family are named. Tables map our names to theirs, without ``prefix``.

    If our name ends in "weight" or "bias", both are names of tensors, otherwise of modules with these two tensors.

    Args:
        name: the beginning of its class names.
        prefix: the prefix of the encoder's names in a model with a head.
        heads: the parts of all heads except token classifiers, whose names are the same in all families. A pooler is
            part of a sequence classifier.
        decoder: the last layer of the masked-LM head. If a checkpoint has its weights, they equal the embeddings.
        tasks: our class and its head, by the part of the class name after ``name``.
        embeddings: the embeddings and positions, and a norm at the end.
        layers: the prefix of names within a layer, with "{}" for its number; or a function of our configuration, which
            returns the prefixes of all layers.
        qkv: the projections of a layer to query, key and value; a fused projection has their rows in this order.
        layer: the other parts of a layer.
        stacked: our tensors with a row for each layer; their tensor's name within the layer.
        joined: our other tensors that are built from several of their tensors.
        projection: the layer from embeddings to wider hidden states.
        unused: beginnings of names without a counterpart.
        skips_padding: whether positions are counted from the one after the padding token's id.
        without: options without a counterpart here, each with the value that it must have.
        renamed: their options, by our fields with a different name.
        fixed: fields that all models of the family have.
        options: a function of their configuration that returns more fields.
    """

    name: str
    prefix: str
    heads: Mapping[str, str]
    decoder: str
    tasks: Mapping[str, Task] = _TASKS
    embeddings: Mapping[str, str] = {**_WITHOUT_POSITIONS, "position.weight": POSITIONS}
    layers: str | Callable[[EncoderConfig], list[str]] = "encoder.layer.{}."
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    layer: Mapping[str, str] = _LAYER
    stacked: Mapping[str, str] = {}
    joined: Mapping[str, tuple[str, ...]] = {}
    projection: str = "embeddings_project"
    unused: tuple[str, ...] = ()
    skips_padding: bool = False
    without: Mapping[str, object] = {}
    renamed: Mapping[str, str] = {}
    fixed: Mapping[str, object] = {}
    options: Callable[[PreTrainedConfig], dict[str, object]] | None = None

    def encoder_names(self, config: EncoderConfig) -> dict[str, tuple[str, ...]]:
        """Return our name of each tensor of an encoder, with the names of their tensors that it is built from."""
        if isinstance(self.layers, str):
            prefixes = [self.layers.format(layer) for layer in range(max(config.passes) + 1)]
        else:
            prefixes = self.layers(config)
        projections = {f"attention.{part}": theirs for part, theirs in zip(QKV, self.qkv, strict=True)}
        parts = {
            f"layers.{layer}.{ours}": prefix + theirs
            for layer, prefix in enumerate(prefixes)
            for ours, theirs in {**projections, **self.layer}.items()
        }
        if config.embedding_projection or config.embedding_size != config.hidden_size:
            parts["embeddings.projection"] = self.projection
        stacked = {ours: tuple(prefix + theirs for prefix in prefixes) for ours, theirs in self.stacked.items()}
        return {**_tensors({**self.embeddings, **parts}), **stacked, **self.joined}

    def head_names(self, task: Task | None = None) -> dict[str, tuple[str, ...]]:
        """Return our name of each tensor of a task's head and of the pooler, with their names; None: of all heads."""
        parts = {
            ours: theirs
            for ours, theirs in {**self.heads, **_TOKEN_HEADS}.items()
            if task is None or theirs.startswith("pooler") or f"{ours}.".startswith(task.head)
        }
        return _tensors(parts)


def _tensors(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors in a table of tensors and modules."""
    ends = {ours: ("",) if ours.endswith((".weight", ".bias")) else (".weight", ".bias") for ours in table}
    return {ours + end: (theirs + end,) for ours, theirs in table.items() for end in ends[ours]}


FAMILIES = {
    "bert": Family(
        name="Bert",
        prefix="bert.",
        heads=_BERT_HEADS,
        decoder="cls.predictions.decoder",
        tasks={**_TASKS, "ForPreTraining": _MASKED_LM},
        unused=("cls.seq_relationship.",),
    ),
    "albert": Family(
        name="Albert",
        prefix="albert.",
        heads={
            **_masked_lm("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
            **_classifier("pooler", "classifier"),
        },
        decoder="predictions.decoder",
        tasks={**_TASKS, "ForPreTraining": _MASKED_LM},
        renamed={"classifier_dropout": "classifier_dropout_prob"},
        layers="encoder.albert_layer_groups.{}.albert_layers.0.",
        qkv=("attention.query", "attention.key", "attention.value"),
        layer=_layer("attention.dense", "attention.LayerNorm", "ffn", "ffn_output", "full_layer_layer_norm"),
        projection="encoder.embedding_hidden_mapping_in",
        fixed={"embedding_projection": True},
        unused=("sop_classifier.",),
    ),
    "roberta": Family(
        name="Roberta",
        prefix="roberta.",
        heads=_ROBERTA_HEADS,
        decoder="lm_head.decoder",
        unused=("pooler.",),
        without=_GELU,
        skips_padding=True,
    ),
    "electra": Family(
        name="Electra",
        prefix="electra.",
        heads={
            **_masked_lm("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
            **_OWN_CLASSIFIER,
            **_DISCRIMINATOR,
        },
        decoder="generator_lm_head",
        tasks={**_TASKS, "ForPreTraining": _DISCRIMINATES},
        without=_GELU,
        fixed={"classifier_act": "gelu"},
    ),
    "distilbert": Family(
        name="DistilBert",
        prefix="distilbert.",
        heads={
            **_masked_lm("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
            **_classifier("pre_classifier", "classifier"),
        },
        decoder="vocab_projector",
        embeddings={**_WITHOUT_TYPES, "position.weight": POSITIONS},
        layers="transformer.layer.{}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        layer=_layer("attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
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
        heads=_ROBERTA_HEADS,
        decoder="lm_head.decoder",
        embeddings={**_WITHOUT_TYPES, "position.parts.0.weight": POSITIONS, "position.parts.1.weight": RELATIVE},
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        layer={**_LAYER, "attention.out": "attention.attn.o", "attention_norm": "attention.LayerNorm"},
        unused=("pooler.",),
        skips_padding=True,
        # transformers always computes with these; the configuration does not change them.
        without={**_GELU, "pad_token_id": 1, "relative_attention_num_buckets": 32},
        fixed={"position": "learned+t5", "type_vocab_size": 0, "classifier_dropout": None},
    ),
    "modernbert": Family(
        name="ModernBert",
        prefix="model.",
        heads={
            **_masked_lm("head.dense", "head.norm", "decoder.bias"),
            **_classifier("head.dense", "classifier"),
            "classifier.norm": "head.norm",
            "transform.dense": "head.dense",
            "transform.norm": "head.norm",
        },
        decoder="decoder",
        embeddings={
            WORDS: "embeddings.tok_embeddings.weight",
            "embeddings.norm": "embeddings.norm",
            "norm": "final_norm",
        },
        layers="layers.{}.",
        qkv=("attn.Wqkv", "attn.Wqkv", "attn.Wqkv"),
        layer=_layer("attn.Wo", "attn_norm", "mlp.Wi", "mlp.Wo", "mlp_norm"),
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
        options=modernbert_options,
    ),
    "deberta-v2": Family(
        name="DebertaV2",
        prefix="deberta.",
        heads=_BERT_HEADS,
        decoder="cls.predictions.decoder",
        embeddings=_WITHOUT_POSITIONS,
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        # All layers project one table with their projections of tokens. Here, the method has copies of these: the
        # results are the same, but training changes the copies separately. A bias of keys adds the same number to all
        # scores of a query.
        stacked={
            "position.key_weight": "attention.self.key_proj.weight",
            "position.query_weight": "attention.self.query_proj.weight",
            "position.query_bias": "attention.self.query_proj.bias",
        },
        joined={"position.table": DISTANCES},
        unused=("lm_predictions.", "mask_predictions."),
        without={"legacy": True},
        options=deberta_options,
    ),
    "funnel": Family(
        name="Funnel",
        prefix="funnel.",
        heads={
            "head.decoder.bias": "lm_head.bias",
            **_classifier("classifier.linear_hidden", "classifier.linear_out"),
            **_DISCRIMINATOR,
        },
        decoder="lm_head",
        tasks={**_TASKS, "BaseModel": Task(Encoder), "ForPreTraining": _DISCRIMINATES},
        embeddings={**_WITHOUT_TYPES, "embeddings.norm": "embeddings.layer_norm"},
        layers=funnel_layers,
        qkv=("attention.q_head", "attention.k_head", "attention.v_head"),
        layer={
            **_layer("attention.post_proj", "attention.layer_norm", "ffn.linear_1", "ffn.linear_2", "ffn.layer_norm"),
            "attention.segments.bias": "attention.r_s_bias",
            "attention.segments.weight": "attention.seg_embed",
        },
        stacked={
            "position.content_bias": "attention.r_w_bias",
            "position.position_bias": "attention.r_r_bias",
            "position.kernel": "attention.r_kernel",
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
            # A Funnel lacks these options, or uses their names for something else.
            "max_position_embeddings": 512,
            "classifier_dropout": None,
            "initializer_range": 0.02,
        },
        options=funnel_options,
    ),
}
"""The families by their ``model_type``."""

# RoBERTa with other vocabularies; bge-m3 and multilingual-e5 are XLM-RoBERTas.
for _kind, _name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert")):
    FAMILIES[_kind] = FAMILIES["roberta"]._replace(name=_name)
