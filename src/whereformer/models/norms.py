"""The norms of encoders and decoders: layer norm or RMS norm, with or without biases."""

from __future__ import annotations

from torch import nn

from .config import EncoderConfig
from .seq2seq.config import Seq2SeqConfig


def make_norm(config: EncoderConfig | Seq2SeqConfig, width: int) -> nn.Module:
    """Return the norm of ``config.norm_type`` over the last dimension, which is ``width`` wide."""
    if config.norm_type == "rms":
        return nn.RMSNorm(width, eps=config.layer_norm_eps)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.biases)
