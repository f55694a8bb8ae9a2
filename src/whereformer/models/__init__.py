"""The encoder, as a Hugging Face model: BERT, ALBERT and what lies between, with any position method."""

from __future__ import annotations

from .._extras import require

require("hf", "transformers", "safetensors")

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM  # noqa: E402

from .config import Block, EncoderConfig, parse_blocks  # noqa: E402
from .encoder import Encoder, EncoderForMaskedLM  # noqa: E402

__all__ = ["Block", "Encoder", "EncoderConfig", "EncoderForMaskedLM", "parse_blocks"]

AutoConfig.register(EncoderConfig.model_type, EncoderConfig)
AutoModel.register(EncoderConfig, Encoder)
AutoModelForMaskedLM.register(EncoderConfig, EncoderForMaskedLM)
