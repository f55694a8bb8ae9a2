"""Build the encoders to compare, which differ only in their position method, and save them after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

from ...files import new_folder
from ...lab import manifest
from ...lab.encoders import BASELINE, build_model, small_config
from ...lab.methods import check_methods
from ...models import EncoderConfig, EncoderForCausalLM, EncoderForMaskedLM
from ...models.heads import EncoderWithLMHead
from ...models.presets import PRESETS
from .settings import CompareSettings


def layers_of(preset: str | None, blocks: str | None, decoder_layers: str | None) -> tuple[str, str]:
    """Return the blocks and the decoder's layers of an encoder, with a preset's or our own in place of None.

    Raises:
        InputError: if there is no such encoder, or it has no state for every token.
    """
    own = {} if preset is None else PRESETS[preset]
    blocks = own.get("blocks", "4") if blocks is None else blocks
    if decoder_layers is None:
        decoder_layers = own.get("decoder_layers", "1") if "-" in blocks else "0"
    EncoderConfig.preset(preset or "bert", blocks=blocks, decoder_layers=decoder_layers).require_full_length()
    return blocks, decoder_layers


def encoder_config(settings: CompareSettings, position: str, vocab_size: int) -> EncoderConfig:
    """Return one method's encoder configuration. Every method has its own default options, also in a preset.

    Raises:
        InputError: if the settings do not fit the preset.
    """
    gated = settings.preset is not None and PRESETS[settings.preset].get("feed_forward") == "gated"
    return small_config(
        settings.preset,
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_heads,
        blocks=settings.blocks,
        decoder_layers=settings.decoder_layers,
        position=position,
        position_options={},
        max_position_embeddings=settings.length,
        causal=settings.causal,
        segments="embedding",
        # A gated layer has three matrices instead of two.
        intermediate_size=8 * ceil(settings.hidden_size / 6) if gated else 2 * settings.hidden_size,
    )


def untrained(settings: CompareSettings, position: str, vocab_size: int, seed: int) -> EncoderWithLMHead:
    """Build an untrained model of one method. With the same seed, all methods start from the same backbone weights."""
    config, baseline = (encoder_config(settings, name, vocab_size) for name in (position, BASELINE))
    return build_model(EncoderForCausalLM if settings.causal else EncoderForMaskedLM, config, baseline, seed)


def check_positions(names: Sequence[str], settings: CompareSettings) -> None:
    """Raise an InputError for a method that does not fit these settings."""
    check_methods(
        names,
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        num_layers=encoder_config(settings, BASELINE, settings.vocab_size).num_hidden_layers,
        max_length=settings.length,
    )


def model_folder(out: Path, position: str, seed: int) -> Path:
    """Return the folder in ``out`` for the trained model of a method and seed."""
    # No name of a method has a comma.
    return out / "models" / f"{position.replace('/', ',')}-{seed}"


def _facts(settings: CompareSettings, position: str, seed: int) -> dict[str, Any]:
    """Return what the manifest of a trained model says about it."""
    return {"settings": asdict(settings), "position": position, "seed": seed}


def model_problem(out: Path, settings: CompareSettings, position: str, seed: int) -> str | None:
    """Return why the trained model of a method and seed does not count, or None if it does."""
    return manifest.problem(model_folder(out, position, seed), _facts(settings, position, seed))


def keep_model(model: EncoderWithLMHead, out: Path, settings: CompareSettings, position: str, seed: int) -> None:
    """Save a trained model for ``from_pretrained``, set to give logits at every token, with a manifest.

    Raises:
        InputError: if the disk is full.
    """
    # Imported here because it imports transformers' Trainer, which takes a second.
    from ...lab.loading import quiet_transformers

    model.config.sparse_prediction = False
    with quiet_transformers(), new_folder(model_folder(out, position, seed)) as partial:
        model.save_pretrained(partial)
        manifest.write(partial, _facts(settings, position, seed))
