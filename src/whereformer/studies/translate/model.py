"""Build the translation model's configuration and its search settings."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from ...data import subwords
from ...lab.training.model_options import as_setting, check_position_options
from ...models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from ..pretrain.settings import parsed_options
from .settings import Decoding, TranslationTraining, TranslatorSettings


def build_config(model: TranslatorSettings, training: TranslationTraining, vocab_size: int) -> Seq2SeqConfig:
    """Return the model's configuration. The model is built once on the meta device, so that errors appear at once.

    Raises:
        InputError: if the settings do not fit together.
    """
    options = parsed_options(model.position_options)
    sizes = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.decoder_layers,
    }
    try:
        check_position_options(model.position, options)
        config = Seq2SeqConfig.preset(
            model.preset,
            **{name: size for name, size in sizes.items() if size is not None},
            vocab_size=vocab_size,
            position=model.position,
            position_options=options,
            cross_position=model.cross_position,
            norm=model.norm,
            hidden_dropout_prob=model.dropout,
            label_smoothing=model.label_smoothing,
            max_position_embeddings=training.max_length,
            pad_token_id=subwords.PAD,
            bos_token_id=subwords.START,
            eos_token_id=subwords.END,
            decoder_start_token_id=subwords.START,
        )
        with torch.device("meta"):
            Seq2SeqForConditionalGeneration(config)
    except (ValueError, TypeError) as error:
        raise as_setting(error, Seq2SeqConfig.__dataclass_fields__, options) from None
    return config


def generation_config(config: Seq2SeqConfig, decoding: Decoding, **limit: int) -> GenerationConfig:
    """Return settings for transformers' ``generate``, with ``max_length`` or ``max_new_tokens`` as the limit."""
    return GenerationConfig(
        num_beams=decoding.beams,
        length_penalty=decoding.length_penalty if decoding.beams > 1 else None,
        **limit,
        do_sample=False,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
