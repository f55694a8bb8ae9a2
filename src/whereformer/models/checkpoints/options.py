"""The options of ModernBERT, DeBERTa and Funnel as our fields, if a field depends on several options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from transformers import PreTrainedConfig

from ...errors import InputError, short_repr
from ..blocks import parse_blocks
from ..config import EncoderConfig

T = TypeVar("T")

_WITHOUT_DECODER = ("FunnelBaseModel", "FunnelForSequenceClassification")
_VERSION_3_OPTIONS = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "conv_kernel_size": 0,
}


def modernbert_options(config: PreTrainedConfig) -> dict[str, object]:
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
    windows = _shortest_cycle([0 if kind == "full_attention" else window for kind in config.layer_types])
    return {
        "position_options": {"base": _shortest_cycle([rotation["rope_theta"] for rotation in rotations])},
        "windows": ",".join(map(str, windows)) if any(windows) else None,
        "sparse_prediction": config.sparse_prediction,
        "classifier_pooling": config.classifier_pooling,
    }


def _shortest_cycle(values: Sequence[T]) -> list[T]:
    """Return the shortest list whose repetition gives the values."""
    lengths = range(1, len(values) + 1)
    return next(list(values[:n]) for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))


def deberta_options(config: PreTrainedConfig) -> dict[str, object]:
    """Return the fields of a DeBERTa that depend on several of its options, or have another name.

    Raises:
        InputError: for an option that is not as in version 3; the message names it.
    """
    options = {name: getattr(config, name, None) or type(value)() for name, value in _VERSION_3_OPTIONS.items()}
    options["pos_att_type"] = sorted(config.pos_att_type or ())
    for name, expected in {**_VERSION_3_OPTIONS, "pos_att_type": ["c2p", "p2c"]}.items():
        if options[name] != expected:
            reason = f"expected {expected!r}, as in DeBERTa's version 3, got {short_repr(options[name])}"
            raise InputError(name, f"{reason}; attach accepts all versions")
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


def funnel_options(config: PreTrainedConfig) -> dict[str, object]:
    """Return the fields of a Funnel that depend on several of its options, or have another name.

    Raises:
        InputError: for a decoder that has no counterpart.
    """
    sizes, repeats = config.block_sizes, config.block_repeats
    has_decoder = (config.architectures or [""])[0] not in _WITHOUT_DECODER
    layers = config.num_decoder_layers if has_decoder else 0
    if has_decoder and not (len(sizes) > 1 and repeats[0] == 1 and layers):
        # In these cases, transformers adds the states of an earlier pass, adds the last states to themselves, or runs
        # no layer after that.
        expected = "expected a decoder with layers after several blocks, the first without repeats"
        values = f"block_sizes {sizes}, block_repeats {repeats} and num_decoder_layers {layers}"
        raise InputError("block_sizes", f"{expected}, got {values} in the checkpoint's configuration")
    blocks = (f"{size}x{times}" if times > 1 else str(size) for size, times in zip(sizes, repeats, strict=True))
    return {
        "blocks": "-".join(blocks),
        "decoder_layers": str(layers),
        "position_options": {"form": "factorized" if config.attention_type == "factorized" else "shifted"},
        "type_vocab_size": getattr(config, "type_vocab_size", 3),
    }


def funnel_layers(config: EncoderConfig) -> list[str]:
    """Return the beginning of the names in each layer, the decoder's layers last."""
    blocks = parse_blocks(config.blocks)
    layers = [f"encoder.blocks.{index}.{layer}." for index, block in enumerate(blocks) for layer in range(block.layers)]
    return layers + [f"decoder.layers.{layer}." for block in config.decoder_blocks for layer in range(block.layers)]
