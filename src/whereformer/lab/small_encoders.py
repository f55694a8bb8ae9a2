"""Small encoders that differ only in their position method: their configuration, and the weights all start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..models import EncoderConfig, EncoderForCausalLM, EncoderForMaskedLM
from ..positions import PositionRangeError
from . import methods

Value = TypeVar("Value")

BASELINE = "none"
"""The method without positions, whose weights all models start from."""


def small_config(
    preset: str | None = None, *, position: str, blocks: str, hidden_size: int, **fields: Any
) -> EncoderConfig:
    """Return the configuration of a small encoder, for training too short to need dropout.

    Without a preset, it is BERT with pre-layer normalization. ``position`` is the name of a row
    (:func:`~whereformer.lab.methods.config_fields`). Fields that do not fit the preset raise an InputError.
    """
    return EncoderConfig.preset(
        preset or "bert",
        **({"norm": "pre"} if preset is None else {}),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # A row is one stretch of text, without token types.
        type_vocab_size=0,
        layer_norm_eps=1e-6,
        hidden_size=hidden_size,
        # BERT's 0.02 suits a width of 768. Narrow layers start to learn sooner with a larger range.
        initializer_range=min(0.06, 0.02 * math.sqrt(768 / hidden_size)),
        sparse_prediction=True,
        blocks=blocks,
        **methods.config_fields(position, blocks, fields.get("decoder_layers", "0")),
        **fields,
    )


def build(config: EncoderConfig, seed: int) -> EncoderForMaskedLM | EncoderForCausalLM:
    """Build an untrained language model. With the same seed, all methods start from the weights of BASELINE."""
    kind = EncoderForCausalLM if config.causal else EncoderForMaskedLM
    # The names of an encoder's labels are for two of them.
    fields = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
    torch.manual_seed(seed)
    plain = {"position": BASELINE, "position_options": {}, "sinks": False}
    backbone = kind(EncoderConfig.from_dict({**fields, **plain})).state_dict()
    torch.manual_seed(seed)
    model = kind(config)
    missing = model.load_state_dict(backbone, strict=False).missing_keys
    assert all(name.startswith("encoder.position.") or name.endswith(".sinks") for name in missing), missing
    return model


def at_lengths(lengths: Sequence[int], score: Callable[[int], Value]) -> list[Value | str]:
    """Return the score at each length, or an error's message if the position method has too few positions for it."""
    scores: list[Value | str] = []
    for length in lengths:
        try:
            scores.append(score(length))
        except PositionRangeError as error:
            scores.append(str(error))
    return scores
