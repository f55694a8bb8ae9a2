"""Counts an encoder's parameters and floating-point operations, on torch's "meta" device.

There tensors have shapes but no memory, so the real model runs at any size. Torch counts its matrix products, with two
operations per multiply-add. As in the Funnel-Transformer paper (Dai et al. 2020, arXiv 2006.03236), norms, activations,
softmax and dropout do not count.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import InputError
from ..models import Encoder, EncoderConfig
from ..models.heads import MaskedLMHead

META = torch.device("meta")


@dataclass(frozen=True)
class Parameters:
    """The numbers of trained parameters; ``encoder`` excludes the masked-LM head, whose tied embeddings count once.

    An encoder that pools without a decoder has no masked-LM head.
    """

    embeddings: int
    position: int
    layers: int
    head: int

    @property
    def encoder(self) -> int:
        return self.embeddings + self.position + self.layers

    @property
    def total(self) -> int:
        return self.encoder + self.head


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward of the whole batch.

    Args:
        layers: all layers, including the decoder's, positions and segments; models are compared by this number.
        embeddings: the projection of embeddings that are narrower than the model.
        head: the masked-LM head; 0 for an encoder that pools without a decoder.
    """

    layers: int
    embeddings: int
    head: int

    @property
    def forward(self) -> int:
        """All operations of the forward."""
        return self.layers + self.embeddings + self.head

    @property
    def training(self) -> int:
        """The operations of forward and backward: each product has two gradients of the same size."""
        return 3 * self.forward


def count_flops(config: EncoderConfig, length: int, batch: int = 1, *, predictions: int | None = None) -> Flops:
    """Count the operations of an :class:`~whereformer.Encoder` and its masked-LM head in training, without memory.

    All pairs of tokens count, even pairs that a window or causality keeps apart.

    Args:
        config: the encoder.
        length: the number of tokens in a sequence.
        batch: the number of sequences.
        predictions: the number of tokens per sequence that the masked-LM head predicts; if None, all of
            them, or none if blocks pool without a decoder.

    Raises:
        ValueError: for sizes that do not match, including a length beyond the position method's range.
    """
    max_predictions = length if config.full_length else 0
    if predictions is None:
        predictions = max_predictions
    if not 0 <= predictions <= max_predictions:
        raise InputError(
            "predictions", f"expected 0 to {max_predictions} (0 for blocks without a decoder), got {predictions}"
        )
    config = copy.deepcopy(config)
    config.attention_backend = "reference"  # torch sees the products of this backend
    with META:
        encoder, head = Encoder(config), MaskedLMHead(config)
        ids = torch.empty(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        hidden = encoder(ids, token_type_ids=ids if config.type_vocab_size else None).last_hidden_state
        encoder_flops = counter.get_total_flops()
        if predictions:
            head(hidden[:, :predictions])
    embeddings = sum(counter.get_flop_counts().get("Encoder.embeddings", {}).values())
    return Flops(encoder_flops - embeddings, embeddings, counter.get_total_flops() - encoder_flops)


def count_parameters(config: EncoderConfig) -> Parameters:
    """Count the parameters of an :class:`~whereformer.Encoder` and its masked-LM head, without memory for them."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    head = 0
    with META:
        encoder = Encoder(config)
        if config.full_length:
            module = MaskedLMHead(config)
            head = size(module) - (module.decoder.weight.numel() if config.tie_word_embeddings else 0)
    embeddings, position = size(encoder.embeddings), size(encoder.position)
    return Parameters(embeddings=embeddings, position=position, layers=size(encoder) - embeddings - position, head=head)
