"""The tensor names of transformers' BERT, ALBERT, RoBERTa and ELECTRA, with ours: one table per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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


class Family(NamedTuple):
    """How transformers names the tensors of one family. Tables map our names to theirs, without ``prefix``.

    Args:
        name: the beginning of its class names.
        prefix: the prefix of the encoder's names in a model with a head.
        models: our class and the names of the head's parts, by the part of the class name after ``name``.
        tied: names of tied copies, with the name that is read.
        layers: the prefix of names within a layer.
        layer: the modules of a layer.
        projection: the layer from embeddings to wider hidden states.
        always_projects: whether that layer exists even if both widths are the same.
        pooler: the source of the dense layer in a sequence classifier; {} if it has its own.
        unused: beginnings of names without a counterpart.
        classifier_act: the activation in a sequence classifier.
        masked_lm_act: the activation of the masked-LM head, whatever the configuration says; None: the configuration's.
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
        """Return our name and theirs for all tensors of an encoder."""
        modules = {
            f"layers.{layer}.{ours}": self.layers.format(layer) + theirs
            for layer in range(max(config.passes) + 1)
            for ours, theirs in self.layer.items()
        }
        if config.embedding_size != config.hidden_size:
            modules["embeddings.projection"] = self.projection
        return {**_EMBEDDINGS, **both(modules)}


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
"""The families by transformers' ``model_type``."""
