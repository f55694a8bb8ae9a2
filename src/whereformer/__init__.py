"""whereformer: swappable, inspectable and fast position methods for self-attention.

Names are imported on first use, so that the command line can look after Ctrl-C before torch is imported. Attention and
position methods need only torch; models need transformers too.
"""

from __future__ import annotations

from .version import __version__ as __version__

# Type checkers take it to be true. The module typing would be an import too.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .kernels import attention, attention_varlen, attention_weights, explain
    from .kernels.terms import (
        DenseBias,
        DistanceDecay,
        FactorPair,
        OffsetBias,
        OffsetKeys,
        OffsetQueries,
        OffsetValues,
        Positions,
    )
    from .lab.report.report import Report
    from .models import (
        Electra,
        ElectraPretrainingConfig,
        Encoder,
        EncoderConfig,
        EncoderForCausalLM,
        EncoderForMaskedLM,
        EncoderForPreTraining,
        EncoderForSequenceClassification,
        EncoderForTokenClassification,
        Seq2SeqConfig,
        Seq2SeqForConditionalGeneration,
        attach,
        detach,
        load_attached,
        load_pretrained,
        unpad,
    )
    from .positions import PositionRangeError, Site, build_position, position_names

    analyze: Callable[..., Report]
    compare: Callable[..., Report]
    extend: Callable[..., Report]
    finetune: Callable[..., Report]
    pretrain: Callable[..., Report]
    probe: Callable[..., Report]
    translate: Callable[..., Report]

__all__ = [
    "DenseBias",
    "DistanceDecay",
    "Electra",
    "ElectraPretrainingConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderForCausalLM",
    "EncoderForMaskedLM",
    "EncoderForPreTraining",
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "FactorPair",
    "OffsetBias",
    "OffsetKeys",
    "OffsetQueries",
    "OffsetValues",
    "PositionRangeError",
    "Positions",
    "Seq2SeqConfig",
    "Seq2SeqForConditionalGeneration",
    "Site",
    "analyze",
    "attach",
    "attention",
    "attention_varlen",
    "attention_weights",
    "build_position",
    "compare",
    "detach",
    "explain",
    "extend",
    "finetune",
    "load_attached",
    "load_pretrained",
    "position_names",
    "pretrain",
    "probe",
    "translate",
    "unpad",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("kernels", "positions"):
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import recipes

    if name in recipes.RECIPES:
        from .lab.recipe import as_function

        return globals().setdefault(name, as_function(recipes.recipe_class(name)))
    modules = (import_module(f"{__name__}.{module}") for module in ("kernels", "positions", "models"))
    value = next(getattr(module, name) for module in modules if name in module.__all__)
    globals()[name] = value  # so that the next use is as fast as any name
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
