"""Counts an encoder's trained parameters, on the model itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...models import Encoder, EncoderConfig
from ...models.heads import MaskedLMHead


@dataclass(frozen=True)
class Parameters:
    """The numbers of trained parameters; ``encoder`` is all but the masked-LM head, whose tied embeddings count once.

    An encoder that pools without a decoder has no such head.
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


def count_parameters(config: EncoderConfig) -> Parameters:
    """Count the parameters of an :class:`~whereformer.Encoder` and its masked-LM head, without allocating them."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    head = 0
    with torch.device("meta"):
        encoder = Encoder(config)
        if config.full_length:
            module = MaskedLMHead(config)
            head = size(module) - (module.decoder.weight.numel() if config.tie_word_embeddings else 0)
    embeddings, position = size(encoder.embeddings), size(encoder.position)
    return Parameters(embeddings=embeddings, position=position, layers=size(encoder) - embeddings - position, head=head)
