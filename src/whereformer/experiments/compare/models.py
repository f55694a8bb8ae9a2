"""The encoders that are compared: built alike but for position, and kept when they are trained."""

from __future__ import annotations

from pathlib import Path

import torch

from ...models import EncoderConfig, EncoderForMaskedLM
from .results import BASELINE
from .settings import Sizes

INITIALIZER_RANGE = 0.06
"""Wider than BERT's 0.02, which is made for a width of 768: narrow layers start learning sooner."""


def encoder_config(sizes: Sizes, position: str, vocab_size: int) -> EncoderConfig:
    """The encoder of one method; without dropout, since no token is seen often enough to be learned by heart."""
    return EncoderConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        blocks=sizes.blocks,
        decoder_layers=sizes.decoder_layers,
        position=position,
        max_position_embeddings=sizes.length,
        norm="pre",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=0,
        layer_norm_eps=1e-6,
        initializer_range=INITIALIZER_RANGE,
        intermediate_size=2 * sizes.hidden_size,
        sparse_prediction=True,
    )


def build_model(sizes: Sizes, position: str, vocab_size: int, seed: int) -> EncoderForMaskedLM:
    """A fresh model of one method; all methods of a seed start from the same backbone, weight for weight."""
    torch.manual_seed(seed)
    backbone = EncoderForMaskedLM(encoder_config(sizes, BASELINE, vocab_size)).state_dict()
    torch.manual_seed(seed)
    model = EncoderForMaskedLM(encoder_config(sizes, position, vocab_size))
    missing = model.load_state_dict(backbone, strict=False).missing_keys
    assert all(name.startswith("encoder.position.") for name in missing), missing
    return model


def model_folder(out: Path, position: str, seed: int) -> Path:
    """Where a comparison in ``out`` keeps the trained model of a method and seed."""
    return out / "models" / f"{position}-{seed}"


def keep_model(model: EncoderForMaskedLM, folder: Path) -> None:
    """Write a trained model for ``from_pretrained``; whoever loads it wants logits at every token."""
    # Here, because it brings transformers' Trainer, which takes a second to import.
    from ...training.trainer import quiet_transformers

    model.config.sparse_prediction = False
    with quiet_transformers():
        model.save_pretrained(folder)
