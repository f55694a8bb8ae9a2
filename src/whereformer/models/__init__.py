"""The encoder, as a Hugging Face model: BERT, ALBERT and what lies between, with any position method."""

from __future__ import annotations

from .._extras import require

require("hf", "transformers", "safetensors")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .attach import attach, detach, load_attached  # noqa: E402
from .config import Block, EncoderConfig, parse_blocks  # noqa: E402
from .electra import Electra  # noqa: E402
from .encoder import Encoder  # noqa: E402
from .heads import (  # noqa: E402
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from .pretrained import from_authors_weights, load_pretrained, to_transformers  # noqa: E402

__all__ = [
    "Block",
    "Electra",
    "Encoder",
    "EncoderConfig",
    "EncoderForMaskedLM",
    "EncoderForPreTraining",
    "EncoderForQuestionAnswering",
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "attach",
    "detach",
    "from_authors_weights",
    "load_attached",
    "load_pretrained",
    "parse_blocks",
    "to_transformers",
]

AutoConfig.register(EncoderConfig.model_type, EncoderConfig)
AutoModel.register(EncoderConfig, Encoder)
AutoModelForMaskedLM.register(EncoderConfig, EncoderForMaskedLM)
AutoModelForPreTraining.register(EncoderConfig, EncoderForPreTraining)
AutoModelForQuestionAnswering.register(EncoderConfig, EncoderForQuestionAnswering)
AutoModelForSequenceClassification.register(EncoderConfig, EncoderForSequenceClassification)
AutoModelForTokenClassification.register(EncoderConfig, EncoderForTokenClassification)
