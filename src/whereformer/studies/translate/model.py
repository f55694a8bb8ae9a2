"""Build the translation model's configuration and its search settings."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from ...data import subwords
from ...lab.options import parsed_options
from ...lab.training.model_options import as_setting
from ...models import Seq2SeqConfig, Seq2SeqForConditionalGeneration
from .settings import SIZES, TranslationSettings


def build_config(settings: TranslationSettings, vocab_size: int) -> Seq2SeqConfig:
    """Return the model's configuration. The model is built once on the meta device, so that errors appear at once.

    Raises:
        InputError: if the settings do not fit together.
    """
    options = parsed_options(settings.position_options)
    sizes = {name: getattr(settings, name) for name in SIZES}
    sizes["num_attention_heads"] = sizes.pop("num_heads")
    try:
        config = Seq2SeqConfig.preset(
            settings.preset,
            **{name: size for name, size in sizes.items() if size is not None},
            vocab_size=vocab_size,
            position=settings.position,
            position_options=options,
            cross_position=settings.cross_position,
            norm=settings.norm,
            hidden_dropout_prob=settings.dropout,
            label_smoothing=settings.label_smoothing,
            max_position_embeddings=settings.max_length,
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


def generation_config(config: Seq2SeqConfig, max_length: int) -> GenerationConfig:
    """Return settings for transformers' ``generate``: the beam search of Vaswani et al."""
    return GenerationConfig(
        num_beams=4,
        length_penalty=0.6,
        max_length=max_length,
        do_sample=False,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
