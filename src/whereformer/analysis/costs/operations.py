"""Counts the floating-point operations of an encoder's forward.

Only matrix products count, with two operations per multiply-add. As in the Funnel-Transformer paper (Dai et al. 2020,
arXiv 2006.03236), norms, activations, softmax and dropout do not count: they are less than one percent of a typical
model. Pairs that a layer's window keeps apart do not count, although the reference computes all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...models import EncoderConfig, parse_blocks
from .passes import decoder_depth
from .trace import Trace


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward of the whole batch.

    Args:
        linear: projections and feed-forward networks of the blocks' layers.
        attention: their scores and weighted sums of values.
        position: what their positions add, by whatever method.
        segments: what "attention" segments add to their scores, given the tokens' types.
        decoder: all of the above in the decoder's layers.
        embeddings: the projection of embeddings that are narrower than the model.
        head: the masked-LM head; 0 for an encoder that pools without a decoder.
    """

    linear: int
    attention: int
    position: int
    segments: int
    decoder: int
    embeddings: int
    head: int

    @property
    def layers(self) -> int:
        """The operations without embeddings and head, by which models are compared, as in the paper."""
        return self.linear + self.attention + self.position + self.segments + self.decoder

    @property
    def forward(self) -> int:
        """All operations of the forward."""
        return self.layers + self.embeddings + self.head

    @property
    def training(self) -> int:
        """The operations of forward and backward: each product has two gradients of the same size."""
        return 3 * self.forward


def count_flops(config: EncoderConfig, length: int, batch: int = 1, predictions: int = 0) -> Flops:
    """Count the operations of a forward; ``predictions`` tokens per sequence go through the masked-LM head."""
    # Every backend has the same operations, and a backend may be unavailable on a given device.
    return flops_of(Trace(config, length, batch, torch.float32, torch.device("cpu"), "auto"), predictions)


def linear_flops(config: EncoderConfig) -> float:
    """Return the paper's relative FLOPs: layers weighted by length and squared width, in units of BERT-base's twelve.

    ``sum_b depth_b / 2 ** b`` plus the decoder's depth, times ``(hidden_size / 768) ** 2 / 12``: this is exact if only
    projections and feed-forward networks of the usual proportions count.
    """
    depth = sum(block.layers * block.repeats / 2**index for index, block in enumerate(parse_blocks(config.blocks)))
    return (depth + decoder_depth(config)) * (config.hidden_size / 768) ** 2 / 12


def flops_of(trace: Trace, predictions: int) -> Flops:
    """Count the operations of a traced forward, and of the masked-LM head on ``predictions`` tokens per sequence."""
    config, batch, passes = trace.config, trace.batch, trace.passes
    width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    encoder = len(passes) - decoder_depth(config)
    parts = []
    for layer, (place, position, segments) in enumerate(zip(passes, trace.flops, trace.segment_flops, strict=True)):
        n_q, n_k = place.n_q, place.n_k
        # The projections of queries and output run over the queries, those of keys and values over the keys.
        of_queries, of_keys = (2, 2) if trace.content else (1, 1)
        of_feed_forward = 3 if config.feed_forward == "gated" else 2
        linear = width * inner * (of_queries * n_q + of_keys * n_k)
        linear += of_feed_forward * n_q * width * config.intermediate_size
        attention = (2 if trace.content else 1) * trace.pairs(layer) * inner
        parts.append((2 * batch * linear, 2 * batch * attention, position, segments))
    linear, attention, position, segments = (sum(part) for part in zip(*parts[:encoder], strict=True))
    narrow = config.embedding_size if config.embedding_size != width else 0
    transform = width * config.embedding_size if config.lm_head == "bert" else narrow * width
    return Flops(
        linear=linear,
        attention=attention,
        position=position,
        segments=segments,
        decoder=sum(map(sum, parts[encoder:])),
        embeddings=2 * batch * trace.length * narrow * width + trace.embed_flops,
        head=2 * batch * predictions * (transform + config.embedding_size * config.vocab_size),
    )
