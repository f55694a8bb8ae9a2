"""Small encoders that differ in their position method alone: what they are like, and weights that all start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..models import EncoderConfig, EncoderForCausalLM, EncoderForMaskedLM
from ..models.heads import EncoderWithLMHead
from ..positions import PositionRangeError

Model = TypeVar("Model", bound=EncoderWithLMHead)
Value = TypeVar("Value")

BASELINE = "none"
"""The method without positions, whose weights all models start from."""
INITIALIZER_RANGE = 0.06
"""Larger than BERT's 0.02, which suits a width of 768, because narrow layers then start to learn sooner."""


def small_config(preset: str | None = None, **fields: Any) -> EncoderConfig:
    """Return the configuration of a small encoder, for training too short to need dropout.

    Args:
        preset: the architecture; None is BERT with pre-layer normalization.
        fields: more fields of the configuration.

    Raises:
        InputError: if the fields do not fit the preset.
    """
    return EncoderConfig.preset(
        preset or "bert",
        **({"norm": "pre"} if preset is None else {}),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # A row is one stretch of text, without token types.
        type_vocab_size=0,
        layer_norm_eps=1e-6,
        initializer_range=INITIALIZER_RANGE,
        sparse_prediction=True,
        **fields,
    )


def build_model(kind: type[Model], config: EncoderConfig, baseline: EncoderConfig, seed: int) -> Model:
    """Build an untrained model of a class. With the same seed, all methods start from the weights of ``baseline``.

    That is the same configuration with the method BASELINE.
    """
    torch.manual_seed(seed)
    backbone = kind(baseline).state_dict()
    torch.manual_seed(seed)
    model = kind(config)
    missing = model.load_state_dict(backbone, strict=False).missing_keys
    assert all(name.startswith("encoder.position.") for name in missing), missing
    return model


def build(config: EncoderConfig, seed: int) -> EncoderForMaskedLM | EncoderForCausalLM:
    """Build an untrained language model. With the same seed, all methods start from the weights of BASELINE."""
    kind = EncoderForCausalLM if config.causal else EncoderForMaskedLM
    # The names of an encoder's labels are for two of them.
    fields = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
    baseline = EncoderConfig.from_dict({**fields, "position": BASELINE, "position_options": {}})
    return build_model(kind, config, baseline, seed)


def at_lengths(lengths: Sequence[int], score: Callable[[int], Value]) -> list[Value | str]:
    """Return the score at each length, or why there is none: the position method has no positions so far out."""
    found: list[Value | str] = []
    for length in lengths:
        try:
            found.append(score(length))
        except PositionRangeError as error:
            found.append(str(error))
    return found
