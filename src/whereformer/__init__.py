"""whereformer: swappable, inspectable and fast position methods for self-attention.

Importing this package needs only torch. Names that need transformers are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .kernels import (
    DenseBias,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetValues,
    Positions,
    attention,
    attention_weights,
    explain,
)
from .positions import Place, PositionRangeError, build_position, position_names

__version__ = "0.1.0"

_LAZY = {
    "Electra": "models",
    "ElectraPretrainingConfig": "models",
    "Encoder": "models",
    "EncoderConfig": "models",
    "EncoderForMaskedLM": "models",
    "EncoderForPreTraining": "models",
    "EncoderForQuestionAnswering": "models",
    "EncoderForSequenceClassification": "models",
    "EncoderForTokenClassification": "models",
    "Seq2SeqConfig": "models",
    "Seq2SeqForConditionalGeneration": "models",
    "attach": "models",
    "detach": "models",
    "from_authors_weights": "models",
    "load_attached": "models",
    "load_pretrained": "models",
    "to_transformers": "models",
}

__all__ = [
    "DenseBias",
    "Electra",
    "ElectraPretrainingConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderForMaskedLM",
    "EncoderForPreTraining",
    "EncoderForQuestionAnswering",
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "FactorPair",
    "OffsetBias",
    "OffsetKeys",
    "OffsetValues",
    "Place",
    "PositionRangeError",
    "Positions",
    "Seq2SeqConfig",
    "Seq2SeqForConditionalGeneration",
    "attach",
    "attention",
    "attention_weights",
    "build_position",
    "detach",
    "explain",
    "from_authors_weights",
    "load_attached",
    "load_pretrained",
    "position_names",
    "to_transformers",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
