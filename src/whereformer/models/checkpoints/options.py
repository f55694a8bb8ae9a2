"""The options of ModernBERT, DeBERTa and Funnel as our fields, where these depend on several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import InputError, short_repr
from ..blocks import parse_blocks
from ..config import EncoderConfig

_WITHOUT_DECODER = ("FunnelBaseModel", "FunnelForSequenceClassification")
_OF_VERSION_3 = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "conv_kernel_size": 0,
}


def modernbert_options(config: Any) -> dict[str, Any]:
    """Return the fields of a ModernBERT that depend on several of its options."""
    if config.classifier_activation != config.hidden_activation:
        reason = f"expected hidden_activation's {config.hidden_activation!r}"
        raise InputError("classifier_activation", f"{reason}, got {config.classifier_activation!r}")
    rotations = [config.rope_parameters[kind] for kind in config.layer_types]
    for rotation in rotations:
        if rotation["rope_type"] != "default":
            raise InputError("rope_type", f"expected 'default', got {short_repr(rotation['rope_type'])}")
    # The option counts both sides together.
    window = config.local_attention // 2
    if window < 1 and "sliding_attention" in config.layer_types:
        raise InputError("local_attention", f"expected at least 2, got {short_repr(config.local_attention)}")
    windows = _in_turn([0 if kind == "full_attention" else window for kind in config.layer_types])
    return {
        "position_options": {"base": _in_turn([rotation["rope_theta"] for rotation in rotations])},
        "windows": ",".join(map(str, windows)) if any(windows) else None,
        "sparse_prediction": config.sparse_prediction,
        "classifier_pooling": config.classifier_pooling,
    }


def _in_turn(values: Sequence[Any]) -> list[Any]:
    """Return the shortest list that gives the values if it is repeated."""
    lengths = range(1, len(values) + 1)
    return next(list(values[:n]) for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))


def deberta_options(config: Any) -> dict[str, Any]:
    """Return the fields of a DeBERTa that depend on several of its options, or are named otherwise.

    Raises:
        InputError: for an option that is not as in version 3; the message names it.
    """
    given = {name: getattr(config, name, None) or type(wanted)() for name, wanted in _OF_VERSION_3.items()}
    given["pos_att_type"] = sorted(config.pos_att_type or ())
    for name, wanted in {**_OF_VERSION_3, "pos_att_type": ["c2p", "p2c"]}.items():
        if given[name] != wanted:
            raise InputError(
                name,
                f"expected {wanted!r}, as in DeBERTa's version 3, got {short_repr(given[name])}; attach takes others",
            )
    reach, buckets = (getattr(config, name, -1) for name in ("max_relative_positions", "position_buckets"))
    # Without buckets, each distance has a row.
    return {
        "position": "deberta",
        "position_options": {
            "max_distance": reach if reach > 0 else config.max_position_embeddings,
            "num_buckets": buckets if buckets > 0 else None,
        },
        "classifier_dropout": getattr(config, "cls_dropout", None),
        "classifier_act": config.pooler_hidden_act,
    }


def funnel_options(config: Any) -> dict[str, Any]:
    """Return the fields of a Funnel that depend on several of its options, or are named otherwise.

    Raises:
        InputError: for a decoder that has no counterpart.
    """
    sizes, repeats = config.block_sizes, config.block_repeats
    decoder = (config.architectures or [""])[0] not in _WITHOUT_DECODER
    layers = config.num_decoder_layers if decoder else 0
    if decoder and not (len(sizes) > 1 and repeats[0] == 1 and layers):
        # In these cases transformers adds the states of an earlier pass, adds the last states to themselves, or runs no
        # layer after.
        raise InputError(
            "block_sizes",
            "expected a decoder to have layers, and before it several blocks of which the first does not "
            f"repeat, got block_sizes {sizes}, block_repeats {repeats} and num_decoder_layers {layers} in the "
            "checkpoint's configuration",
        )
    blocks = (f"{size}x{times}" if times > 1 else str(size) for size, times in zip(sizes, repeats, strict=True))
    return {
        "blocks": "-".join(blocks),
        "decoder_layers": str(layers),
        "position_options": {"form": "factorized" if config.attention_type == "factorized" else "shifted"},
        "type_vocab_size": getattr(config, "type_vocab_size", 3),
    }


def funnel_layers(config: EncoderConfig) -> list[str]:
    """Return the beginning of the names in each layer, those of the decoder last."""
    blocks = parse_blocks(config.blocks)
    layers = [f"encoder.blocks.{index}.{layer}." for index, block in enumerate(blocks) for layer in range(block.layers)]
    return layers + [f"decoder.layers.{layer}." for block in config.decoder_blocks for layer in range(block.layers)]
