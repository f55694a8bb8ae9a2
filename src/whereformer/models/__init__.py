"""Hugging Face models with any position method: encoders (BERT, ALBERT, funnels), ELECTRA and translation."""

from __future__ import annotations

from .._extras import require

require("hf", "transformers", "safetensors")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from .attachment import attach, detach, load_attached  # noqa: E402
from .blocks import Block, parse_blocks  # noqa: E402
from .checkpoints.pretrained import load_pretrained  # noqa: E402
from .config import EncoderConfig  # noqa: E402
from .electra import Electra, ElectraPretrainingConfig  # noqa: E402
from .encoder import Encoder  # noqa: E402
from .heads import (  # noqa: E402
    EncoderForCausalLM,
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from .seq2seq import Seq2SeqForConditionalGeneration  # noqa: E402
from .seq2seq_config import Seq2SeqConfig  # noqa: E402
from .unpadding import unpad  # noqa: E402

__all__ = [
    "Block",
    "Electra",
    "ElectraPretrainingConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderForCausalLM",
    "EncoderForMaskedLM",
    "EncoderForPreTraining",
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "Seq2SeqConfig",
    "Seq2SeqForConditionalGeneration",
    "attach",
    "detach",
    "load_attached",
    "load_pretrained",
    "parse_blocks",
    "unpad",
]

AutoConfig.register(EncoderConfig.model_type, EncoderConfig)
AutoModel.register(EncoderConfig, Encoder)
AutoModelForCausalLM.register(EncoderConfig, EncoderForCausalLM)
# By this name, the Trainer's label smoothing knows that labels are one token ahead; registering does not add it.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[EncoderConfig.model_type] = EncoderForCausalLM.__name__
AutoModelForMaskedLM.register(EncoderConfig, EncoderForMaskedLM)
AutoModelForPreTraining.register(EncoderConfig, EncoderForPreTraining)
AutoModelForSequenceClassification.register(EncoderConfig, EncoderForSequenceClassification)
AutoModelForTokenClassification.register(EncoderConfig, EncoderForTokenClassification)
AutoConfig.register(ElectraPretrainingConfig.model_type, ElectraPretrainingConfig)
AutoModelForPreTraining.register(ElectraPretrainingConfig, Electra)
AutoConfig.register(Seq2SeqConfig.model_type, Seq2SeqConfig)
AutoModelForSeq2SeqLM.register(Seq2SeqConfig, Seq2SeqForConditionalGeneration)
