"""Build the encoders to compare, which differ only in position, and save them after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import torch

from ...files import new_folder
from ...lab.training import manifest
from ...models import EncoderConfig, EncoderForMaskedLM
from ...models.presets import PRESETS
from .results import BASELINE, CompareSettings
from .settings import Sizes

INITIALIZER_RANGE = 0.06
"""Larger than BERT's 0.02, which suits a width of 768, because narrow layers then start to learn sooner."""


def encoder_config(sizes: Sizes, position: str, vocab_size: int) -> EncoderConfig:
    """Return one method's encoder configuration. It has no dropout: training is too short to memorise the text.

    Every method has its own default options, also where a preset has others for its own method.

    Raises:
        InputError: if the sizes do not fit the preset.
    """
    preset = "bert" if sizes.preset is None else sizes.preset
    gated = PRESETS[preset].get("feed_forward") == "gated"
    return EncoderConfig.preset(
        preset,
        **({"norm": "pre"} if sizes.preset is None else {}),
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        blocks=sizes.blocks,
        decoder_layers=sizes.decoder_layers,
        position=position,
        position_options={},
        max_position_embeddings=sizes.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # A window is one stretch of text, without token types.
        type_vocab_size=0,
        segments="embedding",
        layer_norm_eps=1e-6,
        initializer_range=INITIALIZER_RANGE,
        # A gated layer has three matrices instead of two.
        intermediate_size=8 * ceil(sizes.hidden_size / 6) if gated else 2 * sizes.hidden_size,
        sparse_prediction=True,
    )


def build_model(sizes: Sizes, position: str, vocab_size: int, seed: int) -> EncoderForMaskedLM:
    """Build an untrained model of one method. With the same seed, all methods start from identical backbone weights."""
    torch.manual_seed(seed)
    backbone = EncoderForMaskedLM(encoder_config(sizes, BASELINE, vocab_size)).state_dict()
    torch.manual_seed(seed)
    model = EncoderForMaskedLM(encoder_config(sizes, position, vocab_size))
    missing = model.load_state_dict(backbone, strict=False).missing_keys
    assert all(name.startswith("encoder.position.") for name in missing), missing
    return model


def model_folder(out: Path, position: str, seed: int) -> Path:
    """Return the folder in ``out`` for the trained model of a method and seed."""
    # No name of a method has a comma.
    return out / "models" / f"{position.replace('/', ',')}-{seed}"


def model_facts(settings: CompareSettings, position: str, seed: int) -> dict[str, Any]:
    """Return what the manifest of a trained model says about it."""
    return {"settings": asdict(settings), "position": position, "seed": seed}


def model_problem(out: Path, settings: CompareSettings, position: str, seed: int) -> str | None:
    """Return why the trained model of a method and seed does not count, or None if it does."""
    return manifest.problem(model_folder(out, position, seed), model_facts(settings, position, seed))


def keep_model(model: EncoderForMaskedLM, folder: Path, facts: Mapping[str, Any]) -> None:
    """Save a trained model for ``from_pretrained``, set to give logits at every token, with a manifest.

    Raises:
        InputError: if the disk is full.
    """
    # Imported here because it imports transformers' Trainer, which takes a second.
    from ...lab.training.trainer import quiet_transformers

    model.config.sparse_prediction = False
    with quiet_transformers(), new_folder(folder) as partial:
        model.save_pretrained(partial)
        manifest.write(partial, facts)
