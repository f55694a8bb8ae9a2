"""whereformer: swappable, inspectable and fast position methods for self-attention.

Importing this package needs only torch. Names that need transformers are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .kernels import attention, attention_weights, explain
from .kernels.terms import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetValues, Positions
from .positions import Place, PositionRangeError, build_position, position_names

__version__ = "0.1.0"

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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.models"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
