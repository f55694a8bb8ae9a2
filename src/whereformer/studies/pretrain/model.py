"""Build the configuration and the model for pretraining, and count its parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from ...data.tokenizers import Vocabulary, trained_vocabulary
from ...lab.options import parsed_options
from ...lab.training.model_options import as_setting, parameters
from ...models import Electra, ElectraPretrainingConfig, EncoderConfig, EncoderForMaskedLM
from .settings import ModelSettings


def build_config(model: ModelSettings, length: int, vocabulary: Vocabulary | None = None) -> EncoderConfig:
    """Return the encoder's configuration. Without a vocabulary it only serves to check everything else.

    Raises:
        InputError: if the settings do not fit together.
    """
    only_checks = vocabulary is None
    vocabulary = vocabulary or trained_vocabulary(64)
    options = parsed_options(model.position_options)
    assert model.position is not None  # resolved
    # With a preset, what is not given is the preset's.
    given: dict[str, Any] = {"windows": model.windows, "position_options": options or None}
    kind = EncoderConfig
    if model.objective == "electra":
        kind = ElectraPretrainingConfig
        given |= {"generator_size": model.generator_size, "discriminator_weight": model.discriminator_weight}
    try:
        config = kind.preset(
            model.preset or "bert",
            vocab_size=vocabulary.size,
            hidden_size=model.hidden_size,
            embedding_size=model.embedding_size,
            num_attention_heads=model.num_heads,
            blocks=model.blocks,
            decoder_layers=model.decoder_layers,
            position=model.position,
            max_position_embeddings=length,
            norm=model.norm,
            hidden_dropout_prob=model.dropout,
            attention_probs_dropout_prob=model.dropout,
            # A window is one stretch of text. Only [SEP] marks where a document ends.
            type_vocab_size=0,
            segments="embedding",
            layer_norm_eps=1e-6,
            # BERT's 0.02 suits a width of 768. Narrow layers learn sooner with a larger range.
            initializer_range=0.02 * math.sqrt(768 / model.hidden_size),
            pad_token_id=vocabulary.pad,
            sparse_prediction=True,
            **{name: value for name, value in given.items() if value is not None},
        )
        # The model is built here, so that errors appear before the text is read and encoded, which may take long.
        if only_checks:
            count_parameters(config)
    except (ValueError, TypeError) as error:
        raise as_setting(error, kind.__dataclass_fields__, options) from None
    return config


def build_model(config: EncoderConfig) -> PreTrainedModel:
    """Build an untrained model."""
    return Electra(config) if isinstance(config, ElectraPretrainingConfig) else EncoderForMaskedLM(config)


def count_parameters(config: EncoderConfig) -> dict[str, int]:
    """Count the trained model's parameters, in all and of its parts, without allocating them."""
    with torch.device("meta"):
        counts = parameters(build_model(config))
    return {**counts, "embedding_parameters": config.vocab_size * config.embedding_size}
