"""What tests ask of transformers: small models to compare with."""

LAYERS = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {"vocab_size": 50, **LAYERS, "max_position_embeddings": 40}
"""Sizes of an encoder, by their names in transformers' BERT and its kin."""


def of_both_stacks(**sizes):
    """Sizes that an encoder and a decoder have alike, as ``encoder_...`` and ``decoder_...``."""
    return {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}
